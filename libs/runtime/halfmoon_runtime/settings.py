"""Read a service's settings once, from flags and environment, into one frozen object.

A flag ``--worker-id`` wins over the variable ``HALFMOON_WORKER_ID``, and that over the default.
A secret has no flag, as any user of a machine can read its processes' command lines.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSuppress, SettingsConfigDict, SettingsError

from halfmoon_metadata.cluster_key_source import (
    CLUSTER_KEY_FILE_VARIABLE,
    CLUSTER_KEY_VARIABLE,
    choose_cluster_key,
)
from halfmoon_metadata.cluster_namespace import CLUSTER_PATTERN, DEFAULT_CLUSTER
from halfmoon_protocol.cluster_keys import split_cluster_keys
from halfmoon_runtime.allowed_hosts import read_allowed_hosts
from halfmoon_runtime.own_address import check_dialled_host, is_loopback, resolve_own_address
from halfmoon_runtime.setting_names import (
    ENVIRONMENT_PREFIX,
    SECRETS,
    misspelt_variables,
    unknown_flags,
)

#: Values of an on-or-off setting, as a flag or in the environment.
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Return an id of this machine or container since its start.

    Processes with equal ids may share memory.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"
    return f"{socket.gethostname()}/{boot}"


class ServiceSettings(BaseSettings):
    """Settings of every service: name, addresses, metadata server, logs and metrics."""

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix=ENVIRONMENT_PREFIX,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    worker_id: str = Field(
        "service-0",
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Stable name of this process in the cluster",
    )
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0 for all; a network such as 10.0.1.0/24 for this"
        " machine's address in it",
    )
    advertise_host: str = Field(
        "",
        description="Name or address by which others reach this process; empty: what it listens"
        " on, or this machine's own address when that is all",
    )
    allowed_hosts: str = Field(
        "",
        description="Names by which HTTP clients may call this service besides its own, separated"
        " by commas; *.example.com for all below it, * for any. Other names are refused where no"
        " key is needed, or this is set",
    )
    transfer_host: str = Field(
        "",
        description="Addresses for KV payloads, separated by commas, or networks as for host; each"
        " is a rail. Empty: as host",
    )
    transfer_backends: str = Field(
        "shm,tcp",
        min_length=1,
        description="Paths for KV payloads, best first, separated by commas: shm, rdma, tcp; one"
        " with a question mark is left out where this machine lacks it",
    )
    host_id: str = Field(
        default_factory=machine_id,
        min_length=1,
        description="Machine id; processes with the same one share memory for KV on this host"
        " (the machine's name and boot id unless given)",
    )
    metadata: str = Field(
        "http://127.0.0.1:7999/metadata",
        description="Metadata server: http://host:port/metadata, redis://host:port/0,"
        " etcd://host:2379 or memory://name; with TLS https://, rediss:// or etcds://",
    )
    cluster: str = Field(
        DEFAULT_CLUSTER,
        pattern=CLUSTER_PATTERN,
        description="Name of the cluster, the same for all its services; several clusters with"
        " names of their own share one metadata server",
    )
    tls_cert: str = Field(
        "",
        description="PEM file with the certificate that all HTTP ports of this service serve TLS"
        " with, and those of its issuers; empty: HTTP in the clear",
    )
    tls_key: str = Field(
        "", description="PEM file with the key of tls_cert, without a passphrase; both or none"
    )
    tls_ca: str = Field(
        "",
        description="PEM file with CAs to trust besides the system's, for TLS to the metadata"
        " server",
    )
    cluster_key: CliSuppress[SecretStr] = Field(
        SecretStr(""),
        description="What peers must know before bytes are moved to or from them; further lines:"
        " other keys that are accepted, while it is changed; empty: nothing",
    )
    cluster_key_file: str = Field(
        "",
        description="File with the cluster key, instead of the variable; other users may not read"
        " it",
    )
    allow_open_network: bool = Field(
        False,
        description="Serve peers beyond loopback without a cluster key: each process that reaches"
        " the ports can read and change what is served",
    )
    transfer_encryption: Literal["on", "off"] = Field(
        "on",
        description="Encryption of KV payloads on TCP when a cluster key is set; the same for all",
    )
    transfer_grants: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Keys of KV for one landing or lease alone: on, off, or auto, on where no bytes"
        " would lose a better path; only tcp checks such keys",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log lines to write"
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="Log lines for people, or one JSON object each"
    )
    metrics_port: Annotated[int, Field(ge=-1, le=65535)] = Field(
        0, description="TCP port of Prometheus metrics; 0 takes a free one, -1 turns them off"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_key_of_file(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Read the key file once, so that `cluster_key` is the key wherever it came from."""
        key = given.get("cluster_key", "")
        text = key.get_secret_value() if isinstance(key, SecretStr) else str(key)
        chosen = choose_cluster_key(text, str(given.get("cluster_key_file", "")))
        return {**given, "cluster_key": SecretStr(chosen)} if chosen else given

    @model_validator(mode="after")
    def _has_both_files(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            files = ["--tls-cert (HALFMOON_TLS_CERT)", "--tls-key (HALFMOON_TLS_KEY)"]
            given, missing = files if self.tls_cert else reversed(files)
            raise ValueError(
                f"{given} is set and {missing} is not: TLS needs both, a certificate and its key"
            )
        return self

    @field_validator("host")
    @classmethod
    def _is_ours(cls, host: str) -> str:
        return resolve_own_address(host)

    @field_validator("advertise_host")
    @classmethod
    def _can_be_dialled(cls, host: str) -> str:
        check_dialled_host(host)
        return host

    @field_validator("allowed_hosts")
    @classmethod
    def _are_names(cls, names: str) -> str:
        read_allowed_hosts(names)
        return names

    @field_validator("transfer_host")
    @classmethod
    def _are_ours(cls, hosts: str) -> str:
        addresses = [resolve_own_address(host.strip()) for host in hosts.split(",") if host.strip()]
        if any(_is_any(address) for address in addresses):
            raise ValueError("peers dial these addresses: name them one by one, or their networks")
        return ",".join(addresses)

    @field_validator("cluster_key")
    @classmethod
    def _can_not_be_guessed(cls, key: SecretStr) -> SecretStr:
        split_cluster_keys(key.get_secret_value())
        return key

    @model_validator(mode="after")
    def _is_closed_to_strangers(self) -> Self:
        for name, address in self.open_addresses.items():
            if not self.allow_open_network:
                raise ValueError(
                    f"{_names(name)} is {address!r}, which other machines may reach, and there is "
                    f"no cluster key: set {CLUSTER_KEY_FILE_VARIABLE} or {CLUSTER_KEY_VARIABLE} to "
                    "the same key for all services, listen on 127.0.0.1, or let in each process "
                    f"that reaches the port with {_names('allow_open_network', '=True')}"
                )
        return self

    @property
    def open_addresses(self) -> dict[str, str]:
        """Addresses beyond loopback, by setting, at which peers are served without a key."""
        if self.cluster_key.get_secret_value():
            return {}
        hosts = {"host": self.host, "transfer_host": self.transfer_host}
        return {
            name: address
            for name, addresses in hosts.items()
            for address in filter(None, addresses.split(","))
            if not is_loopback(address)
        }

    @property
    def advertised_host(self) -> str:
        """Name or address by which others reach this process.

        Raises:
            OSError: the process listens on all addresses and this machine's name resolves to none.
        """
        if self.advertise_host:
            return self.advertise_host
        if not _is_any(self.host):
            return self.host
        name = socket.gethostname()
        try:
            return socket.gethostbyname(name)
        except OSError as error:
            raise OSError(
                f"{_names('host')} is {self.host!r}, and this machine's name {name!r} does not "
                f"resolve: name an address that others reach with {_names('advertise_host')}"
            ) from error

    @property
    def transfer_paths(self) -> list[str]:
        """Backends of the transfer library, best first."""
        return [name.strip() for name in self.transfer_backends.split(",") if name.strip()]

    @property
    def transfer_bind(self) -> list[str]:
        """Addresses to listen on for KV payloads."""
        return self.transfer_host.split(",") if self.transfer_host else [self.host]

    @property
    def transfer_advertise(self) -> list[str]:
        """Addresses that peers dial, one for each of `transfer_bind`.

        Raises:
            OSError: as for `advertised_host`.
        """
        return self.transfer_bind if self.transfer_host else [self.advertised_host]

    @classmethod
    def misspelt_variables(cls) -> dict[str, str]:
        """Variables around us that are nearly a setting, each with the variable that is one."""
        return misspelt_variables(os.environ, cls.model_fields, ENVIRONMENT_PREFIX)

    @classmethod
    def _refuse_unknown(cls, argv: Sequence[str]) -> None:
        flags = {"--help"}
        for name, field in cls.model_fields.items():
            kebab = name.replace("_", "-")
            flags |= {f"--{kebab}", f"--no-{kebab}"} if field.annotation is bool else {f"--{kebab}"}
        unknown = unknown_flags(argv, flags)
        if unknown:
            told = (
                f"{flag} is no flag" + (f": did you mean {near}?" if near else "")
                for flag, near in unknown.items()
            )
            raise SettingsError("\n  ".join(told))

    @classmethod
    def _plain(cls, argv: Sequence[str]) -> list[str]:
        """Rewrite flags such as ``--measure=false`` to ``--no-measure``, which the parser knows."""
        switches = {
            f"--{name.replace('_', '-')}"
            for name, field in cls.model_fields.items()
            if field.annotation is bool
        }
        return [
            _plain_switch(each) if each.partition("=")[0] in switches else each for each in argv
        ]

    @classmethod
    def from_args(cls, argv: Sequence[str], program: str = "") -> Self:
        """Read the settings from flags and environment.

        Invalid settings are printed and end the process with status 2; help ends it with 0.

        Args:
            argv: flags.
            program: name in messages; empty: the package that defines the settings.
        """
        program = program or f"python -m {cls.__module__.partition('.')[0]}"
        try:
            _refuse_secrets(argv)
            cls._refuse_unknown(argv)
            return cls(_cli_parse_args=cls._plain(argv), _cli_prog_name=program)
        except ValidationError as error:
            lines = [_explain(one) for one in error.errors()]
        except SettingsError as error:
            lines = [str(error)]
        sys.stderr.write("\n  ".join([f"{program}: can't start with these settings", *lines]))
        sys.stderr.write(f"\n{program} --help says what there is\n")
        raise SystemExit(2)


def _refuse_secrets(argv: Sequence[str]) -> None:
    for name in SECRETS:
        flag = f"--{name.replace('_', '-')}"
        if any(each.partition("=")[0] == flag for each in argv):
            raise SettingsError(
                f"{flag} is no flag, as all users of this machine could read it: set "
                f"{ENVIRONMENT_PREFIX}{name.upper()}"
            )


def _plain_switch(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    if not equals or value.lower() in _TRUE:
        return flag
    if value.lower() in _FALSE:
        return f"--no-{flag.removeprefix('--')}"
    raise SettingsError(f"{flag} is {value!r}: it is true or false")


def _explain(error: ErrorDetails) -> str:
    """Describe an invalid setting, with its flag and its variable."""
    message = error["msg"][:1].lower() + error["msg"][1:]
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    if name in SECRETS:
        return f"{ENVIRONMENT_PREFIX}{name.upper()}: {message}"
    names = _names(name)
    if error["type"] == "missing":
        return f"{names} is missing: it has no default"
    return f"{names} is {error['input']!r}: {message}"


def _names(name: str, value: str = "") -> str:
    """Return the flag of a setting with its variable."""
    return f"--{name.replace('_', '-')} ({ENVIRONMENT_PREFIX}{name.upper()}{value})"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
