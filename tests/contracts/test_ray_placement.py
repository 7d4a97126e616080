"""What placement relies on in Ray; ``tests/distributed/test_gpu_placement.py`` runs it."""

from tests.contracts.contract import Row, check, parametrized

ORDER = "tensor-parallel groups straddle nodes (rlmath/cluster/placement.py)"
SEES = "an engine of several ranks sees no GPU (rlmath/rollout/requests.py)"

ROWS = [
    Row("ray.util.placement_group:placement_group", takes=("bundles", "strategy"), breaks=ORDER),
    Row(
        "ray.util.placement_group:placement_group",
        takes=("bundle_label_selector",),
        breaks="nodes with broken GPUs are chosen again (rlmath/cluster/placement.py)",
    ),
    Row("ray.util.placement_group:NODE_ID_LABEL_KEY", equals="ray.io/node-id", breaks=ORDER),
    Row(
        "ray.util.placement_group:placement_group_table",
        takes=("placement_group",),
        breaks=ORDER,
    ),
    Row(
        "ray._private.state:GlobalState",
        says=('"bundles_to_node_id": {\n                bundle.bundle_id.bundle_index:',),
        breaks=ORDER,
    ),
    Row(
        "ray.util.scheduling_strategies:PlacementGroupSchedulingStrategy",
        takes=("placement_group", "placement_group_bundle_index"),
        breaks=ORDER,
    ),
    # What runs in a bundle is told the bundle's GPU, not a number within the bundle.
    Row("ray:get_gpu_ids", says=("_group_[0-9A-Za-z]+$",), breaks=ORDER),
    Row(
        "ray._private.accelerators.accelerator:RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR",
        equals="RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        breaks=SEES,
    ),
    Row(
        "ray._private.utils:set_visible_accelerator_ids",
        says=(
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR,\n        False,",
            "if not override_on_zero and len(accelerator_ids) == 0:",
        ),
        breaks=SEES,
    ),
]


@parametrized(ROWS)
def test_ray_is_as_placement_needs_it(row):
    check(row)
