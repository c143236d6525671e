"""The metrics of `/metrics`. No label holds what a client chose: no prompt, user, id or odd
size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ltx2rt.serve.jobs import Job

SECONDS = (0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """sizes: that have a label of their own, as "WxHxF"; the others are "other"."""

    def __init__(self, sizes: frozenset[str] = frozenset()):
        self.sizes, self.registry = sizes, CollectorRegistry()
        of: dict[str, Any] = {"registry": self.registry}
        seconds = partial(Histogram, buckets=SECONDS, **of)
        self.jobs = Gauge("ltx2rt_jobs", "jobs by status", ["status"], **of)
        self.paused = Gauge("ltx2rt_queue_paused", "1 while an operator has paused it", **of)
        self.waited = seconds("ltx2rt_queue_wait_seconds", "from arrival to start")
        self.took = seconds("ltx2rt_job_seconds", "of a completed run", ["pipeline", "size"])
        self.stage = seconds("ltx2rt_stage_seconds", "of a stage", ["stage"])
        self.step = seconds("ltx2rt_step_seconds", "between two steps", ["stage"])
        self.cancel = seconds("ltx2rt_cancel_seconds", "from the wish to the end")
        self.retries = Counter("ltx2rt_retries_total", "jobs queued again", ["why"], **of)
        self.up = Gauge("ltx2rt_replica_up", "1 when it takes jobs", ["replica"], **of)
        self.restarts = Counter("ltx2rt_replica_restarts_total", "of all replicas", **of)
        self.peak = Gauge("ltx2rt_device_peak_bytes", "as the latest job's replica tells", **of)
        self.rss = Gauge("ltx2rt_rss_bytes", "memory on the host", ["process"], **of)
        self.disk = Gauge("ltx2rt_disk_bytes", "used by clips, and free", ["kind"], **of)
        self.requests = Counter("ltx2rt_http_requests_total", "answered", ["route", "code"], **of)
        self.webhooks = Counter("ltx2rt_webhooks_total", "events sent", ["outcome"], **of)
        self.compiled = Counter("ltx2rt_compile_total", "programs built", ["size"], **of)

    def over(self, job: Job, status: str, result: Mapping[str, Any] | None) -> None:
        """A job that ran is over. result: of one that is completed, as the worker tells it."""
        now = time.time()
        if job.cancel is not None and status == "cancelled":
            self.cancel.observe(max(0.0, now - job.cancel))
        report = (result or {}).get("report", {})
        size = f"{job.job.get('size', '0x0')}x{job.job['clip'].get('num_frames', 0)}"
        size = size if size in self.sizes else "other"
        if status == "completed":
            took = self.took.labels(job.job["pipeline"], size)
            took.observe(max(0.0, now - (job.started or now)))
        for stage in report.get("stages", ()):
            self.stage.labels(stage["name"].split(" ")[0]).observe(stage["time_s"])
        self.compiled.labels(size).inc(report.get("programs_built", 0))
        if report.get("peak_bytes") is not None:
            self.peak.set(report["peak_bytes"])
