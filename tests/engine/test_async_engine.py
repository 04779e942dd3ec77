"""AsyncEngine: streams, aborts, event loops, and failures that stay where they belong."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from rawpaged import AsyncEngine, RequestOutputKind, SamplingParams
from rawpaged.engine.output_stream import LoopMailbox, Outputs
from rawpaged.errors import ConfigError, EngineClosedError, InvalidRequestError
from rawpaged.outputs import RequestOutput
from tests.tiny import Records, engine_of, tiny_config, wait_until

PROMPT = [1, 2, 3]
T = TypeVar("T")


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True, "max_tokens": 8, "temperature": 0.0, **given})


ENDLESS = params(max_tokens=None, n=2)


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def engine(records: Records) -> Iterator[AsyncEngine]:
    """One of its own, which has to be idle at the end."""
    with AsyncEngine(tiny_config(max_model_len=512), stats_logger=records) as opened:
        yield opened
        wait_until(lambda: records.is_idle, 1.0)
        engine_of(opened).scheduler.check_integrity()


def run(main: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main, 8)

    return asyncio.run(limited())


async def final(engine: AsyncEngine, prompt: Any = PROMPT, **given: Any) -> RequestOutput:
    """The last output of a request."""
    outputs = [output async for output in engine.generate(prompt, params(**given))]
    assert outputs[-1].finished
    return outputs[-1]


def test_many_streams(engine: AsyncEngine) -> None:
    async def main() -> None:
        alone = [await final(engine, [i] * (i + 1)) for i in range(20)]
        together = await asyncio.gather(*(final(engine, [i] * (i + 1)) for i in range(20)))
        assert [output.outputs for output in together] == [output.outputs for output in alone]

    run(main())


def test_outputs_come_while_it_runs(engine: AsyncEngine) -> None:
    async def main() -> None:
        delta = params(output_kind=RequestOutputKind.DELTA)
        outputs = [output async for output in engine.generate(PROMPT, delta)]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * 8
        assert len({output.request_id for output in outputs}) == 1

    run(main())


def test_validate(async_engine: AsyncEngine) -> None:
    assert async_engine.tokenizer is not None
    assert async_engine.validate("the", params()) == async_engine.tokenizer.encode("the")
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        async_engine.validate(PROMPT, params(max_tokens=1000))


def test_wrong_requests_raise_at_once(engine: AsyncEngine, records: Records) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            engine.generate(PROMPT, params(max_tokens=1000))
        with pytest.raises(InvalidRequestError, match="prompt"):
            engine.generate([], params())

    run(main())
    assert records.requests == []


def test_generate_needs_a_loop(engine: AsyncEngine) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        engine.generate(PROMPT, params())


def test_abort_by_id(engine: AsyncEngine, records: Records) -> None:
    async def main() -> None:
        stream = engine.generate(PROMPT, ENDLESS, request_id="mine")
        outputs = []
        async for output in stream:
            assert output.request_id == "mine"
            outputs.append(output)
            if len(outputs) == 5:
                await engine.abort("mine")
        assert outputs[-1].finished
        assert [sample.finish_reason for sample in outputs[-1].outputs] == ["abort"] * 2
        assert len(outputs[-1].outputs[0].token_ids) >= 2
        await engine.abort("mine")
        await engine.abort("nobody")

    run(main())
    assert [stats.finish_reason for stats in records.requests] == ["abort"] * 2


def test_abort_of_a_waiting_request() -> None:
    with AsyncEngine(tiny_config(max_num_seqs=1)) as engine:

        async def main() -> None:
            first = engine.generate(PROMPT, params(max_tokens=100))
            second = engine.generate(PROMPT, params(), request_id="second")
            await engine.abort("second")
            (output,) = [output async for output in second]
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].token_ids == []
            outputs = [output async for output in first]
            assert outputs[-1].outputs[0].finish_reason == "length"

        run(main())


@pytest.mark.parametrize("num_read", [0, 1, 5])
@pytest.mark.parametrize("how", ["aclose", "aclosing", "break", "drop", "cancel"])
def test_leaving_early(engine: AsyncEngine, records: Records, num_read: int, how: str) -> None:
    """Blocks are free within a second, whether anything was read or not."""

    async def read(started: asyncio.Event) -> None:
        stream = engine.generate(PROMPT, ENDLESS)
        for _ in range(num_read):
            await anext(stream)
        started.set()
        if how == "aclose":
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif how == "aclosing":
            async with aclosing(stream):
                pass
        elif how == "break":
            async for _ in stream:
                break
        elif how == "cancel":
            async for _ in stream:
                pass

    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(read(started))
        await started.wait()
        if how == "cancel":
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        while len(records.requests) < 2:
            await asyncio.sleep(0.002)

    run(main())
    wait_until(lambda: records.is_idle, 1.0)
    assert [stats.finish_reason for stats in records.requests] == ["abort"] * 2


def test_two_loops_in_two_threads(engine: AsyncEngine) -> None:
    async def main() -> list[Any]:
        outputs = await asyncio.gather(*(final(engine, [i, i], max_tokens=20) for i in range(8)))
        return [output.outputs for output in outputs]

    with ThreadPoolExecutor(2) as pool:
        one, other = (pool.submit(run, main()) for _ in range(2))
        assert one.result() == other.result()


def test_the_loop_is_closed_while_it_runs(engine: AsyncEngine, records: Records) -> None:
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        stream = engine.generate(PROMPT, ENDLESS)
        await anext(stream)
        return stream

    stream = loop.run_until_complete(start())
    loop.close()
    wait_until(lambda: len(records.requests) == 2, 1.0)
    assert [stats.finish_reason for stats in records.requests] == ["abort"] * 2
    del stream
    gc.collect()


def test_a_loop_is_woken_once_for_many_outputs() -> None:
    async def main() -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        queues: list[Any] = [asyncio.Queue() for _ in range(3)]
        letters = [(queues[i % 3], ValueError(str(i))) for i in range(9)]
        loop = asyncio.get_running_loop()
        with patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as wake:
            for round in range(2):
                for letter in letters:
                    mailbox.put(*letter)
                assert wake.call_count == round
                mailbox.flush()
                mailbox.flush()
                await asyncio.sleep(0)
            assert wake.call_count == 2
        for i, each in enumerate(queues):
            seen = [str(each.get_nowait()) for _ in range(6)]
            assert seen == [str(j) for j in range(i, 9, 3)] * 2
            assert each.empty()

    run(main())


@pytest.mark.parametrize("is_woken", [True, False])
def test_a_loop_that_is_closed_before_it_wakes(is_woken: bool) -> None:
    loop = asyncio.new_event_loop()
    mailbox = LoopMailbox(loop)
    outputs: Any = None
    mailbox.put(outputs, ValueError())
    if is_woken:
        mailbox.flush()
    loop.close()
    mailbox.flush()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            mailbox.put(outputs, ValueError())


class Letters:
    """A mailbox with one reader, a clock and timers that a test turns."""

    def __init__(self, delay: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.mailbox = LoopMailbox(self.loop, delay)
        self.outputs = Outputs()
        self.timers: list[Any] = []
        self.num_sent = 0

    async def send(self, *, is_urgent: bool = False) -> list[int]:
        """What the reader finds after a step that brought one more."""
        self.mailbox.put(self.outputs, output_of(self.num_sent), is_urgent=is_urgent)
        self.mailbox.flush()
        self.num_sent += 1
        return await self.read()

    async def read(self) -> list[int]:
        await asyncio.sleep(0)
        ready = iter(self.outputs.get_ready, None)
        return [output.num_cached_tokens for output in ready]

    @contextmanager
    def at(self, now: float) -> Iterator[None]:
        def call_later(delay: float, callback: Any) -> None:
            self.timers.append((delay, callback))

        with (
            patch("rawpaged.engine.output_stream.time.monotonic", return_value=now),
            patch.object(self.loop, "call_later", call_later),
        ):
            yield

    async def ring(self, now: float) -> list[int]:
        ((_, callback),) = self.timers
        self.timers.clear()
        with self.at(now):
            callback()
            return await self.read()


def output_of(number: int) -> RequestOutput:
    return RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=PROMPT,
        prompt_logprobs=None,
        outputs=[],
        finished=False,
        num_cached_tokens=number,
    )


def test_outputs_of_fast_steps_gather() -> None:
    async def main() -> None:
        letters = Letters(delay=10.0)
        with letters.at(100.0):
            assert await letters.send() == [0]
        assert not letters.timers  # nobody knows yet how long a step takes
        with letters.at(104.0):
            assert await letters.send() == [1]
        assert [delay for delay, _ in letters.timers] == [10.0]
        for now in (107.0, 111.0):
            with letters.at(now):
                assert await letters.send() == []
        assert await letters.ring(114.0) == [2, 3]
        with letters.at(115.0):
            assert await letters.send() == []
            assert await letters.send(is_urgent=True) == [4, 5]
            assert await letters.send() == []
        assert await letters.ring(124.0) == [6]
        # A step that takes long: nothing came, so the loop is woken again.
        assert await letters.ring(134.0) == []
        assert not letters.timers
        with letters.at(150.0):
            assert await letters.send() == [7]
        assert not letters.timers

    run(main())


@pytest.mark.parametrize(("delay", "step"), [(10.0, 5.0), (10.0, 7.0), (0.0, 0.0)])
def test_outputs_of_slow_steps_come_at_once(delay: float, step: float) -> None:
    async def main() -> None:
        letters = Letters(delay)
        for i in range(5):
            with letters.at(100.0 + i * step):
                assert await letters.send() == [i]
        assert not letters.timers

    run(main())


def test_the_loop_looks_by_itself() -> None:
    async def main() -> None:
        letters = Letters(delay=0.01)
        with patch("rawpaged.engine.output_stream.time.monotonic", return_value=0.0):
            seen = [await letters.send() for _ in range(3)]
        assert seen == [[0], [1], []]
        last = await letters.outputs.get()
        assert isinstance(last, RequestOutput)
        assert last.num_cached_tokens == 2

    run(main())


def test_the_first_and_the_last_output_do_not_wait() -> None:
    """Though the timer never rings."""
    with AsyncEngine(tiny_config(), stream_delay=1.0) as engine:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            delta = params(output_kind=RequestOutputKind.DELTA, max_tokens=40)
            with patch.object(loop, "call_later"):
                for _ in range(3):
                    outputs = [output async for output in engine.generate(PROMPT, delta)]
                    tokens = [output.outputs[0].token_ids for output in outputs]
                    assert [len(ids) for ids in tokens] == [1] * 40
                    assert outputs[-1].finished
                stream = engine.generate(PROMPT, ENDLESS)
                await anext(stream)
                await engine.abort((await anext(engine.generate(PROMPT, delta))).request_id)
                await stream.aclose()

        run(main())


@pytest.mark.parametrize("stream_delay", [-0.1, 1.1, float("nan")])
def test_a_delay_that_nobody_wants(stream_delay: float) -> None:
    with pytest.raises(ConfigError, match="stream_delay"):
        AsyncEngine(tiny_config(), stream_delay=stream_delay)


def test_taking_what_is_ready(engine: AsyncEngine, records: Records) -> None:
    async def main() -> None:
        stream = engine.generate(PROMPT, params(output_kind=RequestOutputKind.DELTA))
        assert stream.take_ready() == []
        outputs = [await anext(stream)]
        while not outputs[-1].finished:
            await asyncio.sleep(0.001)
            outputs += stream.take_ready()
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * 8
        assert stream.take_ready() == []
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(main())
    assert [stats.finish_reason for stats in records.requests] == ["length"]


def test_an_error_is_not_taken(engine: AsyncEngine) -> None:
    async def main() -> None:
        first = engine.generate(PROMPT, ENDLESS, request_id="x")
        second = engine.generate(PROMPT, params(), request_id="x")
        for _ in range(3):
            await anext(first)
        assert second.take_ready() == []
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(second)
        assert second.take_ready() == []
        await first.aclose()

    run(main())


def test_an_id_in_use(engine: AsyncEngine) -> None:
    async def main() -> None:
        first = engine.generate(PROMPT, params(max_tokens=50), request_id="x")
        second = engine.generate(PROMPT, params(), request_id="x")
        with pytest.raises(InvalidRequestError, match="'x' is in use") as info:
            await anext(second)
        assert info.value.param == "request_id"
        outputs = [output async for output in first]
        assert outputs[-1].outputs[0].finish_reason == "length"
        again = [output async for output in engine.generate(PROMPT, params(), request_id="x")]
        assert again[-1].outputs[0].finish_reason == "length"

    run(main())


def test_leaving_a_refused_stream_does_not_end_the_other(engine: AsyncEngine) -> None:
    async def main() -> None:
        first = engine.generate(PROMPT, params(max_tokens=50), request_id="x")
        second = engine.generate(PROMPT, params(), request_id="x")
        await second.aclose()
        outputs = [output async for output in first]
        assert outputs[-1].outputs[0].finish_reason == "length"

    run(main())


def test_given_ids_do_not_meet_generated_ones(engine: AsyncEngine) -> None:
    async def main() -> None:
        streams = [
            engine.generate(PROMPT, params(), request_id=f"request-{i}") for i in range(3)
        ] + [engine.generate(PROMPT, params()) for _ in range(3)]
        for stream in streams:
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "length"

    run(main())


def test_close_during_streams(records: Records) -> None:
    engine = AsyncEngine(tiny_config(max_num_seqs=3), stats_logger=records)

    async def main() -> None:
        streams = [engine.generate(PROMPT, ENDLESS) for _ in range(4)]
        await anext(streams[0])
        await asyncio.to_thread(engine.close)
        for stream in streams:
            outputs = [output async for output in stream]
            assert [sample.finish_reason for sample in outputs[-1].outputs] == ["abort"] * 2
        assert not engine.is_running
        with pytest.raises(EngineClosedError):
            engine.generate(PROMPT, params())
        await engine.abort("nobody")

    run(main())
    engine.close()
    assert records.is_idle
    assert [stats.finish_reason for stats in records.requests] == ["abort"] * 8
