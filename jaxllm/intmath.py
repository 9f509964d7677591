"""Integer arithmetic on sizes. Knows nothing of what is being counted."""


def cdiv(numerator: int, denominator: int) -> int:
    """Returns the quotient rounded up: cdiv(33, 16) is 3."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`: round_up(33, 16) is 48."""
    return cdiv(value, multiple) * multiple


def next_power_of_2(value: int) -> int:
    """Returns the smallest power of two that is at least `value` (1 for values below 1)."""
    return 1 << max(value - 1, 0).bit_length()
