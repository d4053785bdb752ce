"""How much of uploads the server holds in memory, and how much room it keeps for them, while they come in."""

import asyncio

from quire.serving.batch.endpoints import ENDPOINTS
from tests.unit.serving.batch.running_batches import Worker, service_of
from tests.unit.serving.http.shell import exchange, running, until

MIB = 1 << 20
HEAD = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=B\r\n"
PURPOSE = b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
FILE = b'--B\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
END = b"\r\n--B--\r\n"


def upload(num_bytes):
    body = PURPOSE + FILE + b"x" * num_bytes + END
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def chunks(*pieces):
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


UNKNOWN = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def with_files(test, **options):
    async def go():
        async with service_of(None, Worker()) as service, running(ENDPOINTS, **options) as (port, context):
            context.service = service
            context.metrics.rejected = lambda error: None
            await test(port, context)

    asyncio.run(go())


def test_uploads_take_room_among_the_bodies_and_no_more_than_is_in_memory():
    async def test(port, context):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(UNKNOWN + chunks(PURPOSE + FILE, *[b"x" * (MIB // 4)] * 12))
        await until(lambda: context.bodies.num_bytes >= MIB)
        assert context.bodies.num_bytes < 1.5 * MIB  # though 3 MiB have come, or will
        for request in (upload(MIB), UNKNOWN + chunks(PURPOSE + FILE, *[b"x" * (MIB // 4)] * 4)):
            answer = await exchange(port, request, until_close=True)
            assert answer.split()[1] == b"503"
            assert b"too_many_body_bytes" in answer
        assert (await exchange(port, upload(10_000))).split()[1] == b"200"
        writer.close()
        await until(lambda: not context.bodies.num_bytes)
        assert (await exchange(port, upload(3 * MIB))).split()[1] == b"200"

    with_files(test, max_body_bytes=MIB, max_held_body_bytes=MIB + MIB // 2)


def test_upload_of_unknown_length_is_refused_while_it_comes_when_its_owner_has_no_more_room():
    async def test(port, context):
        pieces = [PURPOSE + FILE, *[b"x" * (MIB // 4)] * 20]  # and no end
        answer = await exchange(port, UNKNOWN + chunks(*pieces))
        assert answer.split()[1] == b"400"
        assert b"storage_quota_exceeded" in answer

    with_files(test, max_stored_bytes=3 * MIB)


def test_field_beside_the_file_is_refused_when_it_is_long():
    async def test(port, context):
        body = PURPOSE.replace(b"user_data", b"u" * 5000) + FILE + END
        answer = await exchange(port, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert answer.split()[1] == b"400"
        assert b"Part exceeded maximum size" in answer

    with_files(test)
