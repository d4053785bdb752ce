"""Measure decode steps of several sequences with long contexts, for each format of the KV cache.

    python tools/measure_decode.py MODEL --length 4000 --num-sequences 16 --kv-cache-dtype auto turboquant_4bit

MODEL needs weights, which may be random. Each prompt is computed; a step counts if it decodes all sequences and nothing else.
"""

from __future__ import annotations

import argparse
import random
import statistics

from quire import LLMEngine, SamplingParams
from quire.bench.provenance import find_provenance


def main() -> None:
    """Print the median of the decode steps of each format, and its ratio to that of the first one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=4000, help="tokens of each prompt")
    parser.add_argument("--num-sequences", type=int, default=16)
    parser.add_argument("--num-steps", type=int, default=24)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto", "int8", "turboquant_4bit"])
    args = parser.parse_args()
    first_s = None
    for kv_cache_dtype in args.kv_cache_dtype:
        median_s = _measure(args, kv_cache_dtype)
        first_s = median_s if first_s is None else first_s
        print(
            f"{kv_cache_dtype:<16} {median_s * 1e3:8.1f} ms a step, {first_s / median_s:.2f} x {args.kv_cache_dtype[0]}",
            flush=True,
        )
    print(find_provenance())


def _measure(args: argparse.Namespace, kv_cache_dtype: str) -> float:
    """Return the median duration of a decode step in seconds."""
    engine = LLMEngine(
        args.model,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=args.num_sequences,
        max_model_len=args.length + 2 * args.num_steps + 8 * args.num_sequences,
        num_kv_blocks=args.num_sequences * (args.length // 16 + 2 * args.num_steps),
        num_threads=args.num_threads,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    rng, vocab_size = random.Random(0), engine.report.spec.vocab_size
    engine.is_recording = True
    params = SamplingParams(
        temperature=0.0, max_tokens=args.num_steps + 8 * args.num_sequences, ignore_eos=True, detokenize=False
    )
    for number in range(args.num_sequences):
        prompt = [rng.randrange(vocab_size) for _ in range(args.length)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    durations: list[float] = []
    try:
        while len(durations) < args.num_steps:
            engine.step()
            record = engine.last_step
            if record is not None and [share.num_tokens for share in record.shares] == [1] * args.num_sequences:
                durations.append(record.duration_s)
    finally:
        engine.close()
    return statistics.median(durations)


if __name__ == "__main__":
    main()
