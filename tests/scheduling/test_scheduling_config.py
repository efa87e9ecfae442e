import msgspec
import pytest

from halfmoon_scheduling.config import SchedulingConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("placement", "best", "no placement mode 'best', there are: cache_aware, kvcache_centric"),
        (
            "admission",
            "late",
            "no admission mode 'late', there are: none, baseline, early",
        ),
        ("tbt_slo_multiple", 0, "tbt_slo_multiple is 0, it must be more than 0"),
        ("defer_s", -1, "defer_s is -1, it must be at least 0"),
        ("kvcache_balancing_threshold", 0.9, "kvcache_balancing_threshold is 0.9"),
        ("request_timeout_s", 0, "request_timeout_s is 0, it must be more than 0"),
        ("ttft_slo_s", -1, "ttft_slo_s is -1"),
        ("max_attempts", 0, "max_attempts is 0"),
        ("max_waiting", -1, "max_waiting is -1, it must be at least 0"),
        ("kept_decision_bytes", -1, "kept_decision_bytes is -1"),
        ("group_least_gain", 0.5, "group_least_gain is 0.5"),
        ("block_size", 15, "block_size is 15, allowed are 16 to 512"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulingConfig(**{field: value})  # type: ignore[arg-type]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="tpyo"):
        msgspec.convert({"tpyo": 1}, SchedulingConfig)
