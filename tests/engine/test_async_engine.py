"""AsyncEngine: streams, aborts, event loops, and failures that stay where they belong."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from rawpaged import AsyncEngine, RequestOutputKind, SamplingParams
from rawpaged.engine.output_stream import LoopMailbox
from rawpaged.errors import EngineClosedError, InvalidRequestError
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
    with AsyncEngine(tiny_config(), stats_logger=records) as opened:
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
            for _ in range(2):
                for letter in letters:
                    mailbox.put(*letter)
                await asyncio.sleep(0)
            assert wake.call_count == 2
        for i, each in enumerate(queues):
            seen = [str(each.get_nowait()) for _ in range(6)]
            assert seen == [str(j) for j in range(i, 9, 3)] * 2
            assert each.empty()

    run(main())


def test_a_loop_that_is_closed_before_it_wakes() -> None:
    loop = asyncio.new_event_loop()
    mailbox = LoopMailbox(loop)
    outputs: Any = None
    mailbox.put(outputs, ValueError())
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            mailbox.put(outputs, ValueError())


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
