"""Clients of serve.py: requests over HTTP, streamed; clients that leave; what the server holds meanwhile."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

Reply = dict[str, Any]
PATH = "/v1/completions"


class Load:
    """Asks a server and notes the times."""

    def __init__(self, port: int, model: str) -> None:
        self._url, self._model = f"http://127.0.0.1:{port}", model
        self._num_failed = 0

    async def run(self, asked: Sequence[Reply], *, clients: int) -> Reply:
        """Ask: so many clients that wait for their answers, or (0) each request at its own moment."""
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self._url, timeout=600, limits=limits) as http:
            started_s = time.perf_counter()
            if clients:
                left = iter(asked)
                groups = await asyncio.gather(*(self._ask_on(http, left) for _ in range(clients)))
                answers = [answer for group in groups for answer in group]
            else:
                answers = await asyncio.gather(*(self._ask_later(http, one) for one in asked))
            seconds = time.perf_counter() - started_s
        done = [answer for answer in answers if answer is not None]
        return {"seconds": seconds, "answers": done, "num_failed": len(answers) - len(done)}

    async def _ask_on(self, http: httpx2.AsyncClient, left: Iterator[Reply]) -> list[Reply | None]:
        return [await self._ask(http, one) for one in left]

    async def _ask_later(self, http: httpx2.AsyncClient, asked: Reply) -> Reply | None:
        await asyncio.sleep(asked["at_s"])
        return await self._ask(http, asked)

    async def _ask(self, http: httpx2.AsyncClient, asked: Reply) -> Reply | None:
        asked_s, first_s, tokens, ended = time.perf_counter(), 0.0, 0, False
        async with http.stream("POST", PATH, json=body_of(asked, self._model)) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    ended |= line == "data: [DONE]"
                    continue
                piece = json.loads(line[6:])
                if not first_s and piece["choices"] and piece["choices"][0]["text"]:
                    first_s = time.perf_counter() - asked_s
                if piece.get("usage"):
                    tokens = piece["usage"]["completion_tokens"]
        end_s = time.perf_counter() - asked_s
        return {"first_s": first_s or end_s, "end_s": end_s, "tokens": tokens} if ended and tokens else None


def body_of(asked: Reply, model: str) -> Reply:
    """A streamed completion request."""
    sent = {name: asked[name] for name in ("prompt", "max_tokens", "logit_bias")}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {**sent, "model": model, "temperature": 0, "diffusion": asked["settings"], **usage}


async def cancel_storm(port: int, model: str, asked: Sequence[Reply]) -> Reply:
    """Clients that leave at random moments, 16 at a time; what the server holds afterwards, and its next answer."""
    draw, gate = random.Random(0), asyncio.Semaphore(16)

    async def come_and_go(one: Reply) -> None:
        async with gate:
            _, writer = await _send(port, body_of(one, model))
            await asyncio.sleep(draw.uniform(0, 0.8))
            writer.close()

    await asyncio.gather(*(come_and_go(one) for one in asked))
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        started_s = time.perf_counter()
        await http.post(
            PATH, json={**body_of(asked[0], model), "stream": False, "stream_options": None, "max_tokens": 8}
        )
        next_answer_s = time.perf_counter() - started_s
        gauges = await _read_gauges(http)
    return {
        "num_clients": len(asked),
        "next_answer_s": round(next_answer_s, 3),
        "held": gauges["ar2diff_running"] + gauges["ar2diff_waiting"],
        "kv_use": gauges["ar2diff_kv_use"],
        "cancelled": gauges["ar2diff_cancelled_total"],
    }


async def time_to_cancel(port: int, model: str, asked: Sequence[Reply]) -> Reply:
    """Seconds from a client's leaving in the middle of an answer until its place is seen free; and of one look."""
    draw, seconds = random.Random(1), []
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        looks = [await _time(_read_gauges(http)) for _ in range(20)]
        for one in asked:
            reader, writer = await _send(port, body_of(one, model))
            await reader.readuntil(b"data: ")
            await asyncio.sleep(draw.uniform(0, 0.1))
            writer.close()
            left_s = time.perf_counter()
            while (await _read_gauges(http))["ar2diff_running"]:
                pass
            seconds.append(time.perf_counter() - left_s)
    return {"seconds": seconds, "round_trip_s": sorted(looks)[len(looks) // 2]}


async def _send(port: int, body: Reply) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def _read_gauges(http: httpx2.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def _time(work: Any) -> float:
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s
