"""All that is desired as one table: what the source holds, what somebody named, what is on its way. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.request import AdapterRef
from router.catalog_entry import Canary, Entry, canary_name
from router.catalog_refusals import Refusals
from router.catalog_state import Desired
from router.catalog_upkeep import Status, Upkeep


def named_adapters(static: Mapping[str, str], desired: Desired) -> dict[str, str]:
    """Name -> URI of those that somebody named, canaries last."""
    named = {**static, **desired.loaded}
    canaries = {canary_name(name): canary.uri for name, canary in desired.canaries.items()}
    return {**{name: uri for name, uri in named.items() if name not in desired.removed}, **canaries}


def merged(
    loading: Mapping[str, str],
    discovered: Mapping[str, AdapterRef],
    named: Mapping[str, str],
    desired: Desired,
    upkeep: Upkeep,
    refusals: Refusals,
) -> dict[str, Entry]:
    """By name. `loading` and `named`: name -> URI; `upkeep` knows all that are named."""

    def entry(ref: AdapterRef, status: Status) -> Entry:
        refusal = refusals.get(ref)
        return Entry(ref, Status("failed", refusal.message) if refusal else status, refusal=refusal)

    entries = {name: Entry(AdapterRef(name, uri), Status("loading")) for name, uri in loading.items()}
    entries |= {name: entry(ref, Status()) for name, ref in discovered.items() if name not in desired.removed}
    entries |= {
        name: entry(AdapterRef(name, uri, upkeep.version(name)), upkeep.status(name))
        for name, uri in named.items()
    }
    for name, canary in desired.canaries.items():
        found = entries.pop(canary_name(name))
        # one that cannot be had leaves all requests to the version that can
        if name in entries and found.status.state == "ready":
            entries[name] = replace(entries[name], canary=Canary(found.ref, canary.weight))
    return entries
