"""Where a request goes: adapter affinity, placement, spill; the catalog of desired adapters."""
