"""Generate text without a server: `python examples/generate_offline.py MODEL`."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128)
    (output,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
    print(output.outputs[0].text)
