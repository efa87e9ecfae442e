"""Give transformers an index of weights files in the form that it reads.

The format's `metadata` says nothing that is needed, and some tools leave it out. Transformers fails
without it. So it gets a folder of links beside an index that has it.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfmoon_models.bounded_files import list_files
from halfmoon_models.weight_files import INDEX_FILE, read_index_file


@contextmanager
def folder_with_complete_index(folder: Path) -> Iterator[Path]:
    """Yield a model's folder, or a temporary one of links to its files with a complete index.

    Raises:
        ModelError: the index can't be read.
    """
    index = read_index_file(folder)
    if index is None or isinstance(index.get("metadata"), dict):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="halfmoon-model-") as name:
        made = Path(name)
        for file in list_files(folder) - {INDEX_FILE}:
            (made / file).symlink_to(folder.resolve() / file)
        (made / INDEX_FILE).write_text(json.dumps({**index, "metadata": {}}))
        yield made
