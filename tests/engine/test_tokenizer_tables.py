"""The tables of tokenizers' classes, beside those of transformers that they follow."""

from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from halfmoon_models.tokenizer.class_forms import CLASS_FORMS
from halfmoon_models.tokenizer.tokenizer_class import (
    GENERIC_CLASS,
    MISNAMED_TYPES,
    REGISTERED_CLASSES,
)


def test_types_have_the_classes_that_transformers_registers() -> None:
    known = {*CLASS_FORMS, GENERIC_CLASS}
    theirs = {
        # Without mistral-common, its class is the generic one.
        model_type: (name or "").removesuffix("Fast").replace("MistralCommonBackend", GENERIC_CLASS)
        for model_type, name in TOKENIZER_MAPPING_NAMES.items()
    }
    wanted = {kind: name for kind, name in theirs.items() if name in known}
    assert wanted == REGISTERED_CLASSES


def test_types_with_a_wrong_published_class_are_those_of_transformers() -> None:
    assert MISNAMED_TYPES == MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
