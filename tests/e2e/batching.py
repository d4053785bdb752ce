"""Batches over HTTP, for tests."""

import json

ENDED = ("completed", "failed", "expired", "cancelled")


def upload(server, lines):
    """Upload lines and return the file's id."""
    data = "\n".join(json.dumps(line) for line in lines).encode()
    return upload_bytes(server, data).json()["id"]


def upload_bytes(server, data):
    """Upload bytes as a batch's input and return the answer."""
    boundary = "b0undary"
    part = f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    part += f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    body = part.encode() + data + f"\r\n--{boundary}--\r\n".encode()
    return server.post_bytes("/v1/files", body, f"multipart/form-data; boundary={boundary}")


def start_batch(server, lines):
    """Upload lines, start a batch of completions, and return its id."""
    body = {"input_file_id": upload(server, lines), "endpoint": "/v1/completions", "completion_window": "24h"}
    return server.post("/v1/batches", body).json()["id"]


def ended_batch(server, batch_id):
    """Return a batch that has ended, else None."""
    batch = server.get(f"/v1/batches/{batch_id}").json()
    return batch if batch["status"] in ENDED else None


def custom_ids(server, batch):
    """Return every custom_id in the output and the error file of a batch, as often as it is there."""
    found = []
    for field in ("output_file_id", "error_file_id"):
        if batch.get(field):
            text = server.get(f"/v1/files/{batch[field]}/content").text
            found += [json.loads(line)["custom_id"] for line in text.splitlines()]
    return found
