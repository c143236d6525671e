"""What devices are here."""

from __future__ import annotations

import os


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of the host; available is what can be had without swapping."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return total, int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return total, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
