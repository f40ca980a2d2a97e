"""Run a command that reaches nothing but itself and one server:

    unshare -rn python -m kvtest.loopback PORT SOCKET COMMAND...

In the command's own network 127.0.0.1:PORT is the server that listens at the Unix socket SOCKET.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _run(port: int, socket: str, command: list[str]) -> int:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(socket)
        await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    async with await asyncio.start_server(connected, "127.0.0.1", port):
        process = await asyncio.create_subprocess_exec(*command)
        return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(_run(int(sys.argv[1]), sys.argv[2], sys.argv[3:])))
