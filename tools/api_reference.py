"""Choose the public names of each package, and write a page of each for the API reference.

A page has the package's docstring and the names that it exports, and then the modules that `PUBLIC`
lists. A package that exports nothing and is not listed is an error: it would have no page.
"""

import ast
from pathlib import Path

#: Modules whose names others may use, besides what a package itself exports.
PUBLIC: dict[str, tuple[str, ...]] = {
    "halfmoon_cli": ("up.embedded_cluster",),
    "halfmoon_conductor": ("app", "settings", "errors", "tenants", "journal_file"),
    "halfmoon_conform": (
        "catalogue",
        "check",
        "check_context",
        "run",
        "verdict",
        "report.documents",
        "report.known_failures",
    ),
    "halfmoon_decode": ("app",),
    "halfmoon_engine": ("interface", "errors", "load", "fake_engine"),
    "halfmoon_engine_vllm": ("load", "vllm_options", "vllm_runner"),
    "halfmoon_kvstore": ("app", "settings", "admin_api", "admin_reports"),
    "halfmoon_models": ("folder_inspection", "errors"),
    "halfmoon_prefill": ("app",),
    "halfmoon_prefix_cache": (
        "replica_selector",
        "kvstore_lease",
        "prefix_fetch",
        "arriving_checksums",
        "layer_groups",
        "block_put",
    ),
    "halfmoon_protocol": (
        "blocks",
        "bounds",
        "cluster_keys",
        "codec",
        "error_codes",
        "errors",
        "features",
        "ids",
        "kv_events",
        "kv_layout",
        "logprobs",
        "messages",
        "objects",
        "regions",
        "salts",
        "sampling",
        "seeded_draw",
        "stage_layers",
        "trace_context",
        "versions",
    ),
    "halfmoon_runtime": (
        "settings",
        "engine_settings",
        "lifecycle",
        "membership",
        "channels.network",
        "channels.zmq_network",
        "channels.memory_network",
        "kvstore_clients",
        "observability.operator_http",
        "observability.route_doc",
        "clock",
    ),
    "halfmoon_scheduling": ("commands", "config", "events"),
    "halfmoon_servers": (
        "client.server_client",
        "client.server_description",
        "client.server_errors",
        "kv_events.server_events",
        "kv_events.block_translator",
        "kv_events.server_salts",
        "bridge.server_target",
        "bridge.bridge_settings",
        "bridge.bridge_app",
    ),
    "halfmoon_testing": (
        "worker_caller",
        "block_client",
        "scripted_endpoint",
        "conductor_http",
        "models.tiny_models",
    ),
    "halfmoon_transfer": ("interface", "settings"),
    "halfmoon_vllm": ("connector", "connector_settings", "vllm_version"),
    "halfmoon_workers": (
        "start.worker_settings",
        "prefill.prefill_settings",
        "prefill.prefill_worker",
        "decode.decode_settings",
        "decode.decode_worker",
        "roles.worker_process",
    ),
}


class UndocumentedPackage(Exception):
    """The API reference can't be written; the text names all packages that are at fault."""


def packages(root: Path) -> list[Path]:
    """Return the folders of all packages of a checkout, by name."""
    places = ("libs/*/halfmoon_*/__init__.py", "services/*/halfmoon_*/__init__.py")
    found = (file.parent for place in places for file in root.glob(place))
    return sorted(found, key=lambda folder: folder.name)


def reference_pages(root: Path, public: dict[str, tuple[str, ...]] = PUBLIC) -> dict[str, str]:
    """Return a page of each package, by its name, for mkdocstrings to fill in.

    Raises:
        UndocumentedPackage: a package has no public names, or one that is listed is not there.
    """
    folders = packages(root)
    faults = [fault for folder in folders for fault in _faults(folder, public)]
    there = {folder.name for folder in folders}
    faults += [f"{name}: no such package" for name in sorted(public.keys() - there)]
    if faults:
        raise UndocumentedPackage("tools/api_reference.py:\n  " + "\n  ".join(faults))
    return {folder.name: _page(folder, public.get(folder.name, ())) for folder in folders}


def _faults(folder: Path, public: dict[str, tuple[str, ...]]) -> list[str]:
    name, listed = folder.name, public.get(folder.name, ())
    if not listed and not _exports(folder):
        return [f"{name} has no page: export names by __all__, or list its modules in PUBLIC"]
    missing = [module for module in listed if not _module_file(folder, module)]
    faults = [f"{name}: no module {name}.{module}" for module in missing]
    if ast.get_docstring(_parsed(folder)) is None:
        faults.append(f"{name}: the package has no docstring")
    return faults


def _page(folder: Path, listed: tuple[str, ...]) -> str:
    """Return the package's docstring and exports, then its public modules."""
    name = folder.name
    # Without exports, the package's own members are its modules, public or not.
    package = f"::: {name}" + ("" if _exports(folder) else "\n    options: {members: false}")
    return "\n\n".join([f"# {name}", package, *(f"::: {name}.{each}" for each in listed)]) + "\n"


def _exports(folder: Path) -> bool:
    """Return whether the package says which names it exports."""
    assigned = [node for node in _parsed(folder).body if isinstance(node, ast.Assign)]
    targets = [target for node in assigned for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _parsed(folder: Path) -> ast.Module:
    return ast.parse((folder / "__init__.py").read_text())


def _module_file(folder: Path, module: str) -> bool:
    path = folder.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
