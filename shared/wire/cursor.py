"""Where a transfer stands: the one next message that is allowed. Sender and receiver advance it alike.

Place in the request's path: both ends check every layer header and block against it, before the header is
queued (sender) or reaches the sink (receiver). Looks at no tensor's bytes.
"""

from __future__ import annotations

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.frames import FrameHeader
from kvferry.shared.wire.messages import LayerHeader, TensorHeader


class TransferCursor:
    """The next message expected of a transfer. Not thread-safe.

        LAYER 0  tensor 0: block block ..  tensor 1: block ..  ..  LAYER 1 ..      complete
                                  ▲ layer, tensor, offset

    Layers come from 0 on, each with a header, and each tensor in blocks without gaps. A tensor of no bytes
    has no blocks.

    Attributes:
        sequence: number of the next layer header or block.
        num_blocks, payload_bytes: blocks that have passed, and their bytes.
    """

    def __init__(self, num_layers: int) -> None:
        self.sequence = 0
        self.num_blocks = 0
        self.payload_bytes = 0
        self._num_layers = num_layers
        self._layer = -1
        self._tensors: tuple[TensorHeader, ...] = ()
        self._tensor = 0
        self._tensor_bytes = 0
        self._offset = 0

    def check_complete(self) -> None:
        """Raises TransferFailed ("incomplete") unless every tensor of every layer has passed."""
        if self._layer + 1 < self._num_layers or self._tensor < len(self._tensors):
            raise TransferFailed(f"transfer ends where {self._expected()} is expected", reason="incomplete")

    def pass_layer(self, sequence: int, layer: LayerHeader) -> None:
        """Begin a layer. Raises TransferFailed ("order") if it is not the next one."""
        is_next = layer.layer == self._layer + 1 < self._num_layers and self._tensor == len(self._tensors)
        if sequence != self.sequence or not is_next:
            raise TransferFailed(
                f"header {sequence}, of layer {layer.layer}, came; {self._expected()}, number"
                f" {self.sequence}, is expected",
                reason="order",
            )
        self.sequence += 1
        self._layer += 1
        self._tensors = layer.tensors
        self._tensor = -1
        self._next_tensor()

    def pass_block(self, header: FrameHeader, num_bytes: int) -> None:
        """Pass one block of `num_bytes` payload bytes.

        Raises:
            TransferFailed: it is not the next one ("order"), or the tensor is not as large as the layer's
                header says, or the block reaches beyond it or is empty ("size").
        """
        if header.sequence != self.sequence:
            raise TransferFailed(
                f"block {header.sequence} came; number {self.sequence}, {self._expected()}, is expected",
                reason="order",
            )
        position = (header.layer, header.tensor, header.offset)
        if self._tensor == len(self._tensors) or position != (self._layer, self._tensor, self._offset):
            raise TransferFailed(
                f"layer {header.layer} tensor {header.tensor} offset {header.offset} came;"
                f" {self._expected()} is expected",
                reason="order",
            )
        if (
            header.tensor_bytes != self._tensor_bytes
            or not 1 <= num_bytes <= self._tensor_bytes - self._offset
        ):
            raise TransferFailed(
                f"layer {header.layer} {self._tensors[self._tensor].name} is {header.tensor_bytes} bytes"
                f" (block: {num_bytes} at {header.offset}); the layer's header implies {self._tensor_bytes}",
                reason="size",
            )
        self.sequence += 1
        self.num_blocks += 1
        self.payload_bytes += num_bytes
        self._offset += num_bytes
        if self._offset == self._tensor_bytes:
            self._next_tensor()

    def _next_tensor(self) -> None:
        """Go to the layer's next tensor that has bytes."""
        self._offset = self._tensor_bytes = 0
        while self._tensor_bytes == 0 and self._tensor < len(self._tensors):
            self._tensor += 1
            if self._tensor < len(self._tensors):
                self._tensor_bytes = self._tensors[self._tensor].size_bytes

    def _expected(self) -> str:
        """What is expected next, for messages."""
        if self._tensor < len(self._tensors):
            return f"layer {self._layer} {self._tensors[self._tensor].name} offset {self._offset}"
        if self._layer + 1 < self._num_layers:
            return f"the header of layer {self._layer + 1}"
        return "nothing more"
