"""Numbers with units, for people."""


def bytes_text(num_bytes: float) -> str:
    """A byte count in binary units, three digits.

    Example:
      >>> bytes_text(1_610_612_736), bytes_text(512)
      ('1.5 GiB', '512 B')
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def count_text(count: float) -> str:
    """A count in decimal units, three digits.

    Example:
      >>> count_text(124_439_808), count_text(12)
      ('124 M', '12')
    """
    size = float(count)
    for unit in ("", " k", " M", " B", " T"):
        if abs(size) < 1000 or unit == " T":
            return f"{size:.3g}{unit}"
        size /= 1000
    raise AssertionError("unreachable")
