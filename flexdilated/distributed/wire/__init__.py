"""Encoding of vectors in messages (codecs), and buffers for messages (pools).

Codecs have no state; a pool lends a buffer to one tensor at a time.
"""

from ._codec import Codec, CodecChoice, CodecName, check_codec, codec_for, codec_named, gradient_codec
from ._pool import BufferPool, Lease, PoolChoice, lease_from, name_of, pool_for, pool_named
