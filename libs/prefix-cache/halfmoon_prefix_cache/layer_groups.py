"""Group the layers of a request's blocks into transfers.

A transfer costs processor time for each of its pieces, one per block, whatever their size. For
blocks of 128 KiB per layer it is about the time of the copy itself. So neighbouring layers, whose
bytes touch within a block, go together:

    first │ next two │ as many as `_GROUP_BYTES` hold │ … │ last

The first layer is alone, so that a forward pass can begin with it. The last one is alone, so that
little is on the way when the others are done.
"""

#: Bytes of all layers that are moved in one transfer.
_WHOLE_BYTES = 512 * 1024
#: Bytes of a group of more than one layer, at the most.
_GROUP_BYTES = 16 * 1024 * 1024


def layer_groups(n_layers: int, layer_bytes: int) -> tuple[range, ...]:
    """Return the groups in the order of layers; each layer is in one of them.

    Args:
        n_layers: of the model.
        layer_bytes: bytes of one layer of all blocks that are moved.
    """
    if n_layers * layer_bytes <= _WHOLE_BYTES:
        return (range(n_layers),)
    most = max(1, _GROUP_BYTES // layer_bytes)
    groups: list[range] = []
    start, size, last = 0, 1, n_layers - 1
    while start < last:
        groups.append(range(start, min(start + size, last)))
        start, size = groups[-1].stop, min(2 * size, most)
    return (*groups, range(last, n_layers))
