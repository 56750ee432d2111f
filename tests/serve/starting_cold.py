"""One of many engines that start cold at once: makes it when told, and prints what it generates."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.support.cold_starts import note_compilers, wait_for_the_others


def main() -> None:
    spawned, ready, model, prompt = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    note_compilers(spawned)
    # In this process, where the compilers that the engine starts are seen.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    wait_for_the_others(ready)
    llm = LLM(model, dtype="float32", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    print("TOKENS", json.dumps(list(output.outputs[0].token_ids)), flush=True)


if __name__ == "__main__":
    main()
