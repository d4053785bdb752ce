"""Measure what the KV compression `bounds` skips and costs: python tools/measure_key_bounds.py --text FILE

For several gaps it prints the share of runs of keys that decoding did not read, and the CPU time of a token.
"""

from __future__ import annotations

import argparse
import time

from quire import LLM, KvCompression, SamplingParams
from quire.engine.llm_engine import LLMEngine


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=900, help="tokens of the prompt, the last ones of the text")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--gaps", type=float, nargs="+", default=[200.0, 16.64, 6.24, 1.0])
    parser.add_argument("--repeat", type=int, default=8, help="the least time is printed")
    args = parser.parse_args()
    llm = LLM(args.model, device="cpu", max_num_seqs=1, num_kv_blocks=args.length // 8, num_threads=1)
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    with open(args.text, encoding="utf-8") as file:
        tokens = llm.get_tokenizer().encode(file.read(), add_special_tokens=False)
    times: dict[float | None, list[float]] = {gap: [] for gap in (None, *args.gaps)}
    for _ in range(args.repeat + 1):  # the first one computes the prompt
        for gap, found in times.items():
            fields = None if gap is None else KvCompression(method="bounds", gap=gap)
            params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True, kv_compression=fields)
            before, (looked, skipped) = time.process_time(), engine.scheduler.run_counts
            llm.generate([{"prompt_token_ids": tokens[-args.length :]}], params, use_tqdm=False)
            found.append((time.process_time() - before) / args.max_tokens)
            counts = engine.scheduler.run_counts
            if len(found) > args.repeat:
                share = "" if gap is None else f", {counts[1] - skipped:,} of {counts[0] - looked:,} runs skipped"
                print(f"gap {gap}: {1e6 * min(found):.0f} us of CPU time a token{share}")
    llm.close()


if __name__ == "__main__":
    main()
