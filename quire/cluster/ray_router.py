"""PrefixRequestRouter: Ray Serve's hook for the choice of a replica. This module needs Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.cluster.messages import ForwardedRequest
from quire.cluster.replica_choice import ReplicaChooser
from quire.router.prompt import Prompt


class PrefixRequestRouter(RequestRouter):
    """Sends a request to the replica with the least predicted time to the first token. Ray makes one for each handle."""

    def initialize_state(self, **options: Any) -> None:
        """Take in the arguments of ReplicaChooser."""
        self._chooser = ReplicaChooser(**options)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are, and what they report."""
        super().update_replicas(replicas)
        self._chooser.set_replicas({one.replica_id.unique_id: one.routing_stats or {} for one in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in ranks, the best first; Ray takes the first that has room."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all are full
        found = {one.replica_id.unique_id: one for one in candidate_replicas}
        ranks = self._chooser.order(list(found), _prompt_of(pending_request.args if pending_request else ()))
        return [[found[name] for name in names] for names in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Note that a replica has got a request."""
        request_id = pending_request.metadata.internal_request_id
        self._chooser.begin(request_id, replica_id.unique_id, _prompt_of(pending_request.args))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended."""
        self._chooser.end(internal_request_id)


def _prompt_of(args: Sequence[Any]) -> Prompt | None:
    return args[0].prompt if args and isinstance(args[0], ForwardedRequest) else None
