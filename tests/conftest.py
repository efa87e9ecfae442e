"""What all tests share: how hypothesis behaves on a busy machine."""

from hypothesis import HealthCheck, settings

# No test asserts a time, so neither does hypothesis; fixtures shared by its examples are meant
# to be; a failure prints how to have it again.
settings.register_profile(
    "halfmoon",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.load_profile("halfmoon")
