"""Replicas by id, over a dispatcher's worker numbers; knows nothing of Ray."""

import asyncio
import logging
from collections import deque
from collections.abc import Hashable, Mapping
from itertools import count
from typing import TypeAlias

from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    CloseReason,
    DispatchedRequest,
    FailureAction,
    RequestClosed,
    RequestDispatcher,
    Running,
    WorkerView,
)
from equipoise.balancer.requests.policy import Capacity, WorkerState
from equipoise.balancer.requests.policy_factory import PolicyFactory
from equipoise.hal.errors import EquipoiseError, WorkerError

LOG = logging.getLogger("equipoise.ray")
SILENCE_SECONDS = 60.0
"""How long a request may be bound without a word of Ray, before its slot is given back: a caller
may reserve a replica (`DeploymentHandle.choose_replica`) and send nothing."""
OVERTAKING_SECONDS = 0.1
"""By how much Ray's word that an attempt is over, which a thread of its own brings, may come before
its word of what the replica said of it."""
MAX_SHARE = 1 << 20
"""Tokens of one request between two reports of a replica; more is a counter of something else."""
ReplicaKey: TypeAlias = Hashable
CallId: TypeAlias = Hashable
"""Ray's id of a request. Calls that one request makes to a deployment share theirs."""


class NoBinding(EquipoiseError):
    """The policy binds this request to no replica, and never will: the router goes on without."""


class Attempt:
    """One attempt to have a replica serve a request, from its choice to Ray's word that it is over.

    An object of its own, because Ray says of a rejected attempt that it is over when the request
    has been sent again, under the same id and perhaps to the same replica.

    Attributes:
        bound: the binding by which it was sent.
        timer: gives the slot back where Ray says nothing.
    """

    timer: asyncio.TimerHandle

    def __init__(self, request: "RoutedRequest", bound: BoundToWorker) -> None:
        self.request, self.bound = request, bound

    @property
    def is_current(self) -> bool:
        """Whether its end is that of the request."""
        return self.request.attempt is self


class RoutedRequest(DispatchedRequest):
    """A request whose own task waits for a replica.

    Attributes:
        attempt: the attempt under way; None: there is none, or its end means nothing any more.
            Where its replica was lost its binding is over, and the policy has the request again.
    """

    def __init__(self, number: int, size: int) -> None:
        super().__init__(number, size)
        self.attempt: Attempt | None = None
        self._woken: asyncio.Future[None] | None = None

    async def wait_until_bound(self) -> BoundToWorker:
        """Returns the binding as soon as there is one.

        It may be over before the waiting task runs again, and then the wait goes on.

        Raises `NoBinding` for a closed request.
        """
        while not isinstance(self.status, BoundToWorker):
            if isinstance(self.status, RequestClosed):
                raise NoBinding(f"the request was closed: {self.status.reason.value}")
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
        return self.status

    def on_bound(self, bound: BoundToWorker) -> None:
        """Wake its task."""
        self._wake()

    def on_closed(self, reason: CloseReason) -> None:
        """Wake its task, if it waits; who reads its answer learns of a lost replica from Ray."""
        self.attempt = None
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


class ReplicaPool:
    """Requests in, replicas out; used on one event loop, the running one.

    The first mistake of the policy stops it: every request that waits, and each one from then on,
    raises `NoBinding`, with one line in the log.

    Args:
        factory: makes the policy.
        silence: seconds that a request may be bound without a word of Ray.
    """

    def __init__(self, factory: PolicyFactory, silence: float = SILENCE_SECONDS) -> None:
        self._loop, self._silence = asyncio.get_running_loop(), silence
        # A policy has one worker at least: this one is lost, and a replica takes its number.
        self.dispatcher = RequestDispatcher(factory([1], [None]), 1, self._loop, stop_failed_policy)
        self.dispatcher.remove_worker(0)
        self._numbers: dict[ReplicaKey, int] = {}
        self._keys: dict[int, ReplicaKey] = {}
        self._slots: dict[ReplicaKey, int] = {}
        self._leaving: set[ReplicaKey] = set()
        self._attempts: dict[tuple[ReplicaKey, CallId], deque[Attempt]] = {}
        self._generated: dict[ReplicaKey, int] = {}
        self._names = count()

    @property
    def replicas(self) -> tuple[ReplicaKey, ...]:
        """All of them, those that are leaving included."""
        return tuple(self._numbers)

    @property
    def stopped(self) -> bool:
        """Whether the policy has failed, and is called no more."""
        return self.dispatcher.policy is None

    @property
    def queued(self) -> int:
        """Requests that no replica has yet."""
        return self.dispatcher.queued

    @property
    def attempts(self) -> int:
        """Attempts of which Ray has not said that they are over."""
        return sum(map(len, self._attempts.values()))

    def view(self, replica: ReplicaKey) -> WorkerView:
        """What the dispatcher knows of a replica."""
        return self.dispatcher.workers[self._numbers[replica]]

    # Replicas.

    def set_replicas(self, slots: Mapping[ReplicaKey, int]) -> None:
        """The replicas from now on, with the requests that each takes at a time.

        Those that are gone get no more, and keep their requests until these end: Ray lets a replica
        finish what it has before it stops it.
        """
        for replica in self.replicas:
            if replica not in slots and replica not in self._leaving:
                self._leaving.add(replica)
                self.dispatcher.drain_worker(self._numbers[replica])
        self._release_empty()
        for replica, limit in slots.items():
            if replica not in self._numbers:
                self._add(replica, limit)
                continue
            if replica in self._leaving:
                self._leaving.discard(replica)
                self.dispatcher.resume_worker(self._numbers[replica])
            if self._slots[replica] != limit:
                self._slots[replica] = limit
                self.dispatcher.set_capacity(self._numbers[replica], Capacity(slots=limit))

    def lose(self, replica: ReplicaKey) -> None:
        """A replica died: what it had not begun waits for another one."""
        if replica in self._numbers:
            self._remove(replica)

    def share_tokens(self, replica: ReplicaKey, generated: int, ongoing: int = 0) -> None:
        """A replica has generated so many tokens since it began.

        What that has grown by is divided among the requests that run there, since each makes a
        token a step; `ongoing` says how many these are where other routers have requests there too.
        """
        number = self._numbers.get(replica)
        if number is None:
            return
        running = [
            one
            for one in self.dispatcher.workers[number].requests.values()
            if isinstance(one.status, Running)
        ]
        before = self._generated.get(replica)
        if before is None or generated < before or not running:
            # Nobody knows when these were made, or it counts anew.
            self._generated[replica] = generated
            return
        each = (generated - before) // max(len(running), ongoing)
        # What is left of the division counts the next time.
        self._generated[replica] = before + each * max(len(running), ongoing)
        for request in running:
            self.dispatcher.report_tokens(request, request.tokens + min(each, MAX_SHARE))

    # Requests.

    def submit(self, size: int) -> RoutedRequest:
        """A request arrives; see `RoutedRequest.wait_until_bound`."""
        request = RoutedRequest(next(self._names), size)
        self.dispatcher.submit(request)
        return request

    def replica(self, bound: BoundToWorker) -> ReplicaKey:
        """The replica of a binding that is not over."""
        return self._keys[bound.worker]

    def send(self, request: RoutedRequest, call: CallId) -> None:
        """A bound request is about to be sent to its replica; `end` says when that is over."""
        bound = request.status
        assert isinstance(bound, BoundToWorker)
        key = self.replica(bound), call
        request.attempt = attempt = Attempt(request, bound)
        attempt.timer = self._loop.call_later(self._silence, self._expire, key, attempt)
        self._attempts.setdefault(key, deque()).append(attempt)

    def begin(self, request: RoutedRequest) -> None:
        """A replica has accepted a request: from now on it is moved no more."""
        attempt = request.attempt
        if attempt is not None and attempt.bound is request.status:
            attempt.timer.cancel()
            self.dispatcher.start(request, attempt.bound)
        else:
            # Ray took the replica for dead, and it was not. Whatever the policy has made of the
            # request since, its answer comes from there; the books lack it.
            self.abort(request)

    def fail(self, request: RoutedRequest) -> BoundToWorker | None:
        """An attempt came to nothing; returns its binding, or None where that is over already.

        The request keeps its slot until `retry`: a replica that rejects is full, whatever the books
        say, and must not get the next request at once.
        """
        attempt, request.attempt = request.attempt, None
        if attempt is None:
            return None
        attempt.timer.cancel()
        return attempt.bound if request.status is attempt.bound else None

    def retry(self, request: RoutedRequest, failed: BoundToWorker | None) -> RoutedRequest:
        """Have another replica serve a request whose attempt failed, if there is another.

        Returns the request from now on: another one, where the former is closed.
        """
        if failed is not None:
            self.dispatcher.retry(request, failed)
            self._release_empty()
        return self.submit(request.size) if isinstance(request.status, RequestClosed) else request

    def end(self, replica: ReplicaKey, call: CallId) -> None:
        """An attempt is over: answered, failed, cancelled or rejected.

        Of several under one id the oldest is meant. Rejected ones end before what was sent after
        them; calls that share an id are told apart by nobody.
        """
        key = replica, call
        attempts = self._attempts.get(key)
        if attempts is None:
            return  # Ray chose the replica
        attempt = attempts[0]
        self._forget(key, attempt)
        if isinstance(attempt.request.status, Running):
            self._finish(attempt)
        else:
            # Ray's word of what was before may come after this: of its acceptance, or that another
            # replica is to be chosen. If neither comes, the caller has given it up.
            self._loop.call_later(OVERTAKING_SECONDS, self._finish, attempt)

    def abort(self, request: RoutedRequest) -> None:
        """A request was given up, and no replica has it."""
        self.fail(request)
        self.dispatcher.abort(request)
        self._release_empty()

    def _finish(self, attempt: Attempt) -> None:
        if attempt.is_current:
            attempt.request.attempt = None
            self.dispatcher.finish(attempt.request)
            self._release_empty()

    def _expire(self, key: tuple[ReplicaKey, CallId], attempt: Attempt) -> None:
        LOG.warning("a replica was chosen, and Ray has said nothing of it in %s s", self._silence)
        self._forget(key, attempt)
        if attempt.is_current:
            self.abort(attempt.request)

    def _forget(self, key: tuple[ReplicaKey, CallId], attempt: Attempt) -> None:
        attempt.timer.cancel()
        self._attempts[key].remove(attempt)
        if not self._attempts[key]:
            del self._attempts[key]

    def _add(self, replica: ReplicaKey, slots: int) -> None:
        try:
            number = self.dispatcher.add_worker(Capacity(slots=slots), WorkerState.LOST)
        except WorkerError:
            return  # the policy failed at it: it is stopped, which was logged
        self._numbers[replica], self._keys[number] = number, replica
        self._slots[replica] = slots
        # Known before it serves: it may be bound to at once.
        self.dispatcher.set_health(number, WorkerState.SERVING)

    def _release_empty(self) -> None:
        """Remove what left the list and has no request any more."""
        for replica in [one for one in self._leaving if not self.view(one).requests]:
            self._remove(replica)

    def _remove(self, replica: ReplicaKey) -> None:
        number = self._numbers.pop(replica)
        del self._keys[number], self._slots[replica]
        self._leaving.discard(replica)
        self._generated.pop(replica, None)
        self.dispatcher.remove_worker(number)


def stop_failed_policy(error: Exception) -> FailureAction:
    """Log the failure, and let the router go on without the policy."""
    LOG.error("the policy failed: requests go by Ray's own choice from now on", exc_info=error)
    return FailureAction.STOP_POLICY
