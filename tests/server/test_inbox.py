"""Outputs on their way to the event loop."""

import asyncio
from threading import Thread

from dsi.server.engine_thread import EngineOutput
from dsi.server.inbox import Inbox


def test_inbox_hands_out_all_outputs_in_order_and_wakes_the_loop_once_for_many() -> None:
    asyncio.run(hand_out())


async def hand_out() -> None:
    loop, received, wakes = asyncio.get_running_loop(), list[int](), []
    inbox, call = Inbox(loop), loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: wakes.append(1) or call(*args)  # type: ignore[method-assign, func-returns-value]

    def put() -> None:
        for i in range(500):
            inbox.put(lambda output: received.append(output.root), EngineOutput(root=i))

    thread = Thread(target=put)
    thread.start()
    thread.join()  # the loop cannot run meanwhile
    while len(received) < 500:
        await asyncio.sleep(0)
    inbox.put(lambda output: received.append(output.root), EngineOutput(root=500))
    await asyncio.sleep(0.01)
    assert received == list(range(501))
    assert len(wakes) == 2
