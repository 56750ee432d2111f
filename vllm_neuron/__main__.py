"""``python -m vllm_neuron``: the ``vllm-neuron`` command."""

from vllm_neuron.cli.main import main

main()
