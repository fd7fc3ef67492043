"""A worker for tests of what uses one outside of an engine, which would release it."""

from equipoise.balancer.experts.runtime.jobs import Job, JobHandle, T
from equipoise.balancer.experts.runtime.workers import ThreadWorker


class EagerWorker(ThreadWorker):
    """Its jobs begin at once."""

    def start(self, job: Job[T], name: str, **details: object) -> JobHandle[T]:
        handle = super().start(job, name, **details)
        self.release()
        return handle
