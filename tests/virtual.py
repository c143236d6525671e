"""XLA's flags for a process of JAX on several CPU devices."""

import os


def xla_flags(devices: int) -> str:
    """This process's own flags, `devices`, and patience: with more devices than cores a thread may
    come late to a rendezvous, which XLA takes for a deadlock after 40 s."""
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices} {patience}"
