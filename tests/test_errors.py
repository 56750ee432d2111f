"""Every error is of the one family, with a code of its own, and the page of codes lists it."""

from __future__ import annotations

import pickle

import pytest
from vllm.exceptions import VLLMClientError

from tools import generate_error_reference
from vllm_neuron import errors
from vllm_neuron.cache.disk.progress import Abandoned
from vllm_neuron.cache.store.object_client import ConflictError
from vllm_neuron.serve.token_ids import TokenIdError

CLASSES = generate_error_reference.error_classes()

# What a release has published stays. Whoever adds a class adds its code here.
CODES = {
    "NeuronError": "neuron-error",
    "ConfigError": "configuration",
    "UnsupportedError": "unsupported",
    "UnsupportedOpError": "unsupported-operator",
    "CaptureError": "capture",
    "CompileError": "compile",
    "CompilerMemoryError": "compiler-memory",
    "CacheError": "cache",
    "DamagedEntryError": "damaged-entry",
    "CacheMissError": "cache-miss",
    "IncompatibleHostError": "incompatible-host",
    "EngineFailedError": "engine-failed",
    "NotAsExpected": "unexpected-file",
    "Abandoned": "transfer-abandoned",
    "ManifestError": "manifest",
    "ForeignFormat": "foreign-format",
    "RemoteDownError": "remote-down",
    "ConflictError": "store-conflict",
    "UntrustedEntryError": "untrusted-entry",
    "BindingError": "binding",
    "TokenIdError": "token-id",
}


def test_page_of_codes_is_current() -> None:
    assert generate_error_reference.PAGE.read_text() == generate_error_reference.page(), "run `make docs`"


def test_codes_are_stable_and_unique() -> None:
    assert {error.name: error.code for error in CLASSES} == CODES
    assert len(set(CODES.values())) == len(CODES)


def test_all_errors_are_of_one_family() -> None:
    family = {"NeuronError"}
    while new := {error.name for error in CLASSES if family.intersection(error.bases)} - family:
        family |= new
    assert {error.name for error in CLASSES} == family


@pytest.mark.parametrize(
    "kind", [errors.ConfigError, errors.CompilerMemoryError, Abandoned], ids=lambda kind: kind.code
)
def test_an_error_keeps_code_and_message_between_processes(kind: type[errors.NeuronError]) -> None:
    received = pickle.loads(pickle.dumps(kind("what was wrong")))
    assert (type(received), received.code, str(received)) == (kind, kind.code, "what was wrong")


def test_an_error_of_a_file_system_call_keeps_its_number() -> None:
    error = ConflictError(17, "there already")
    assert (error.code, error.errno, str(error)) == ("store-conflict", 17, "[Errno 17] there already")


def test_a_refused_token_id_is_both_ours_and_a_client_error_of_vllm() -> None:
    error = TokenIdError("no row", parameter="prompt")
    assert isinstance(error, errors.NeuronError)
    assert isinstance(error, VLLMClientError)  # status 400
    assert isinstance(error, ValueError)  # what ``LLM`` promises
    assert (error.code, str(error)) == ("token-id", "no row (parameter=prompt)")
