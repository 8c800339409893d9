"""Binds the deployments: `serve run deployments.app:build model=...`, or a Serve config file."""

# annotations stay objects: Serve reads the one of `build` to validate the arguments
import time
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments.catalog_deployment import CatalogDeployment, CatalogSettings
from deployments.config import AppArgs
from deployments.engine_deployment import EngineDeployment
from deployments.engine_replica import ENGINE_CLIENT, LOAD_CALLS, TOLD_FOR_S, ReplicaSettings, max_requests
from deployments.ingress import IngressDeployment, IngressSettings
from deployments.scaling_policy import POLICY

LOGGING = {"enable_access_log": False}  # the API's own log has what is needed
ROUTER = "router.residency_router.ResidencyRouter"
ENGINE = "engine"
STATS_PERIOD_S = 0.2
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0  # three in a row, and a replica that hangs is replaced
# short ones at once, to a replica; Serve lets them wait where it has no place for a request
CONTROL_CALLS = 8
MANY = 4096  # concurrent requests of a deployment that only waits for others


def build(args: AppArgs) -> Application:
    return application(args, ENGINE_CLIENT)


def application(args: AppArgs, engine_client: str) -> Application:
    """`engine_client`: module:Class; benchmarks of the way to the engine bring a fake."""
    catalog = _catalog(args)
    engines = engine_application(args, catalog, engine_client)
    return (
        serve.deployment(IngressDeployment)
        .options(
            name="ingress",
            num_replicas=args.num_ingress_replicas,
            max_ongoing_requests=MANY,
            graceful_shutdown_timeout_s=args.graceful_shutdown_timeout_s,
            ray_actor_options={"num_cpus": 0.1},
            logging_config=LOGGING,
        )
        .bind(_ingress_settings(args), engines, catalog)
    )


def engine_application(args: AppArgs, catalog: Any, engine_client: str) -> Application:
    engine = args.engine_config()
    settings = ReplicaSettings(
        args.stream_interval_s,
        args.metrics_max_adapters,
        engine_client,
        args.metrics_port,
        args.has_rank_actors,
    )
    router = RequestRouterConfig(
        request_router_class=ROUTER,
        request_router_kwargs=args.router.model_dump(),
        request_routing_stats_period_s=STATS_PERIOD_S,
    )
    return (
        serve.deployment(EngineDeployment)
        .options(
            name=ENGINE,
            **_size(args),
            **_placement(args),
            max_ongoing_requests=max_requests(engine) + LOAD_CALLS + CONTROL_CALLS,
            max_queued_requests=engine.max_queued_requests,
            request_router_config=router,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=args.graceful_shutdown_timeout_s,
            graceful_shutdown_wait_loop_s=0.2,
            max_constructor_retry_count=3,
            ray_actor_options={"num_cpus": 1, "num_gpus": args.gpus_of_replica},
            logging_config=LOGGING,
        )
        .bind(engine, settings, catalog)
    )


def _placement(args: AppArgs) -> dict[str, Any]:
    if not args.has_rank_actors:
        return {}
    rank = {"CPU": 1, "GPU": 1} if args.device == "cuda" else {"CPU": 1}
    return {
        "placement_group_bundles": [rank] * args.tensor_parallel_size,
        "placement_group_strategy": args.rank_placement,
    }


def _size(args: AppArgs) -> dict[str, Any]:
    scaling = args.autoscaling
    if scaling is None:
        return {"num_replicas": args.num_replicas}
    config = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        initial_replicas=args.num_replicas,
        max_replicas=scaling.max_replicas,
        policy=AutoscalingPolicy(policy_function=POLICY),
        # what is wanted has lasted already
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        look_back_period_s=TOLD_FOR_S,
    )
    return {"autoscaling_config": config}


def _catalog(args: AppArgs) -> Application:
    return (
        serve.deployment(CatalogDeployment)
        .options(
            name="catalog",
            max_ongoing_requests=MANY,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            ray_actor_options={"num_cpus": 0.1},
            logging_config=LOGGING,
        )
        .bind(
            CatalogSettings(
                args.adapter_source,
                args.lora_modules,
                args.catalog_file,
                ENGINE,
                args.engine_config().load_timeout_s,
                args.engine_config().max_adapters,
                args.autoscaling.bounds() if args.autoscaling else None,
            )
        )
    )


def _ingress_settings(args: AppArgs) -> IngressSettings:
    return IngressSettings(
        model=args.model,
        model_names=args.model_names(),
        created=int(time.time()),
        load_timeout_s=args.engine_config().load_timeout_s,
        api_key_digests=tuple(args.api_key_digests),
        allow_runtime_loading=args.allow_runtime_lora_updating,
        allowed_uri_prefixes=args.lora_prefixes(),
    )
