"""An OffloadingConnector beside NIXL's, whose worker is simulated: it copies marks."""

from __future__ import annotations

from typing import Any

#: The slot of a block with recurrent state.
STATE = -1
#: No block of the random plays has more slots.
_SLOTS = (*range(128), STATE)


class BlockStore:
    """The blocks that an engine's OffloadingConnector has copied, and copies back.

    Its scheduler half is the release's. A step's copies into the store begin with the next step.

    Attributes:
        completed_jobs: jobs of which the scheduler half is to hear.
        received: requests that have their tokens from the store.
        copied_back: how many jobs have copied blocks back.
    """

    def __init__(self) -> None:
        self.completed_jobs: dict[int, int] = {}
        self.received: set[str] = set()
        self.copied_back = 0
        self._marks: dict[tuple[int, int], int | None] = {}
        self._stores: list[tuple[int, Any]] = []

    def step(self, metadata: Any, marks: dict[tuple[int, int], int | None]) -> None:
        """Copies what a step's metadata names.

        Args:
            marks: of the engine's blocks, by block and slot.
        """
        flushed = [
            (job_id, metadata.store_jobs.pop(job_id))
            for job_id in metadata.jobs_to_flush or ()
            if job_id in metadata.store_jobs
        ]
        for job_id, job in self._stores + flushed:
            _copy(marks, job.src_spec.block_ids, self._marks, job.dst_spec.block_ids)
            self.completed_jobs[job_id] = 1
        self._stores = list(metadata.store_jobs.items())
        for job_id, job in metadata.load_jobs.items():
            _copy(self._marks, job.src_spec.block_ids, marks, job.dst_spec.block_ids)
            self.completed_jobs[job_id] = 1
            self.copied_back += 1
            if not getattr(job, "sync", False):
                self.received.add(job.req_id)

    def worker_metadata(self) -> Any:
        """Returns what workers report to a MultiConnector of NIXL's connector and this one."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common

        if not self.completed_jobs:
            return None
        found = common.OffloadingWorkerMetadata(completed_jobs=self.completed_jobs)
        self.completed_jobs = {}
        return multi_connector.MultiKVConnectorWorkerMetadata(metadata=(None, found))


def _copy(source: dict[Any, Any], source_ids: Any, target: dict[Any, Any], target_ids: Any) -> None:
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        for slot in _SLOTS:
            target[int(target_id), slot] = source.get((int(source_id), slot))
