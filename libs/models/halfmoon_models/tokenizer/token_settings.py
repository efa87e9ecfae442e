"""Read special and added tokens from a tokenizer's small files, with transformers' precedence.

A tokenizer's tokens may stand in ``tokenizer_config.json``, ``special_tokens_map.json``,
``added_tokens.json`` and ``tokenizer.json``, and each file had several forms over the years.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

#: Roles that every class has, in transformers' order.
STANDARD_ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Token = str | AddedToken


@dataclass(frozen=True)
class TokenSettings:
    """The tokens that a folder's small files name."""

    #: Special tokens by role: the standard ones first, then the model's own.
    named: Mapping[str, Token] = field(default_factory=dict)
    #: Further special tokens, without a role.
    extra: Sequence[Token] = ()
    #: Added tokens in the order of their ids.
    added: Sequence[AddedToken] = ()


def read_token_settings(
    configs: Mapping[str, Mapping[str, Any]],
    listed: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, str],
    own_defaults: Mapping[str, str],
) -> TokenSettings:
    """Return the tokens of a folder.

    Args:
        configs: small files by name; a missing one is an empty object.
        listed: `added_tokens` of its ``tokenizer.json``.
        defaults: special tokens by role that the class has where no file names others.
        own_defaults: the same for roles that only this class has.

    Raises:
        ValueError, TypeError: a file has something else in a token's place.
    """
    settings = {key: _converted(value) for key, value in configs["tokenizer_config.json"].items()}
    _rename_additional(settings)
    own = _take_own_roles(settings)
    if "added_tokens_decoder" in settings:
        added = _decoder_tokens(configs["tokenizer_config.json"]["added_tokens_decoder"])
    else:
        _merge_special_map(settings, configs["special_tokens_map.json"])
        own |= _take_dict(settings)
        added = _added_file_tokens(configs["added_tokens.json"], settings)
        added |= {_token_id(each.get("id")): _listed_token(each) for each in listed}
    if "extra_special_tokens" not in settings and "additional_special_tokens" in settings:
        settings["extra_special_tokens"] = settings["additional_special_tokens"]
    by_text = {str(token): token for token in added.values()}
    named: dict[str, Token] = {}
    for role in STANDARD_ROLES:
        if role in settings:
            found = _role_token(role, settings[role])
            token = None if found is None else by_text.get(str(found), found)
        else:
            token = defaults.get(role)
        if token is not None:
            named[role] = token
    for role, value in {**own_defaults, **_other_roles(settings), **own}.items():
        if (token := _role_token(role, value)) is not None:
            named[role] = token
    extra = map(_extra_token, _list_of(settings.get("extra_special_tokens")))
    return TokenSettings(
        named,
        [*extra, *own_defaults.values()],
        [added[token_id] for token_id in sorted(added)],
    )


def _rename_additional(settings: dict[str, Any]) -> None:
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")


def _take_own_roles(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the roles that only this model has, such as `image_token`."""
    roles = _other_roles(settings)
    for role in roles:
        del settings[role]
    return roles | _take_dict(settings)


def _other_roles(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in settings.items()
        if key.endswith("_token") and key not in STANDARD_ROLES and isinstance(value, Token)
    }


def _take_dict(settings: dict[str, Any]) -> dict[str, Any]:
    """Take extra tokens that are listed by role."""
    extra = settings.get("extra_special_tokens")
    if not isinstance(extra, dict):
        return {}
    return dict(settings.pop("extra_special_tokens"))


def _merge_special_map(settings: dict[str, Any], special_map: Mapping[str, Any]) -> None:
    for key, value in special_map.items():
        if isinstance(value, dict) and key != "extra_special_tokens":
            settings[key] = _special(value)
        elif key == "extra_special_tokens" and isinstance(value, list):
            merged = list(_list_of(settings.get(key)))
            for each in map(_extra_token, value):
                if each not in merged:
                    merged.append(each)
            settings[key] = merged
        else:
            settings[key] = value


def _decoder_tokens(decoder: Any) -> dict[int, AddedToken]:
    if not isinstance(decoder, dict):
        raise TypeError("added_tokens_decoder is no object of tokens by id")
    return {_token_id(int(token_id)): _listed_token(token) for token_id, token in decoder.items()}


def _added_file_tokens(
    added: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[int, AddedToken]:
    special = {str(settings[role]) for role in STANDARD_ROLES if settings.get(role)}
    special |= {str(_extra_token(e)) for e in _list_of(settings.get("extra_special_tokens"))}
    return {
        _token_id(token_id): AddedToken(
            text, normalized=text not in special, special=text in special
        )
        for text, token_id in added.items()
    }


def _listed_token(token: Any) -> AddedToken:
    if not isinstance(token, dict):
        raise TypeError(f"an added token is {type(token).__name__}, where an object is wanted")
    return _added_token(token, {})


def _special(token: Mapping[str, Any]) -> AddedToken:
    return _added_token(token, {"special": True})


def _added_token(token: Mapping[str, Any], fixed: Mapping[str, bool]) -> AddedToken:
    content = token.get("content")
    if not isinstance(content, str):
        raise TypeError("an added token has no text as its content")
    flags = {name: bool(token[name]) for name in _FLAGS if name in token}
    return AddedToken(content, **{**flags, **fixed})


def _converted(value: Any) -> Any:
    """Turn the objects that transformers marks as tokens into tokens, wherever they stand."""
    if isinstance(value, dict):
        if value.get("__type") == "AddedToken":
            return _added_token(value, {})
        return {key: _converted(each) for key, each in value.items()}
    return [_converted(each) for each in value] if isinstance(value, list) else value


def _role_token(role: str, value: Any) -> Token | None:
    if value is None or isinstance(value, Token):
        return value
    if isinstance(value, dict):
        return _special(value)
    raise TypeError(f"{role} is {type(value).__name__}, where a token is wanted")


def _extra_token(value: Any) -> Token:
    if isinstance(value, Token):
        return value
    if isinstance(value, dict):
        return _special(value)
    raise TypeError(f"a special token is {type(value).__name__}, where a text is wanted")


def _list_of(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise TypeError("extra_special_tokens is neither a list nor an object of tokens")
    return value


def _token_id(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"an added token's id is {str(value)[:40]}, a whole number is wanted")
    return value
