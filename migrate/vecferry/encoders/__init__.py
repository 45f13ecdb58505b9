"""Encoders: from texts to vectors of a named space.

`load_encoder` makes a `TextEncoder`, which is an `Encoder`, of a folder, a GGUF file, a model of the hub or a server;
`vecferry encode`, `vecferry warm` and `Cascade` take what is an `Encoder`.

What a space is. `Encoder.identity` is `name@hash`; the hash is of the weights' files, the pooling, the normalisation,
the length, and the prompts of both sides. Vectors may be compared where it is equal. An E5 model's `query: ` and
`passage: ` are two prompts of one space, not two spaces: say both (`--prompt e5`) whichever side is encoded, or the
documents and the queries come out as two spaces, which no verb will compare. Other wordings of a text (paraphrases)
are a matter of the texts, and don't change the space.
"""

from vecferry.encoders.contract import Encoder as Encoder
from vecferry.encoders.loading import load_encoder as load_encoder
from vecferry.encoders.mteb import MtebEncoder as MtebEncoder
from vecferry.encoders.prompts import Prompt as Prompt
from vecferry.encoders.text import TextEncoder as TextEncoder
