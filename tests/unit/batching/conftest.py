"""Random cases are not judged by the clock: a busy machine draws them slowly."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy_machine")
