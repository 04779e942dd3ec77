from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.scheduler.pool_machine import BlockPoolMachine
from tests.scheduler.scheduler_machine import SchedulerMachine

TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=400,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
