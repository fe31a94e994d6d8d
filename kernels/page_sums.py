"""One pass over attention probabilities on a CPU, instead of one per quantity."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


# With its types it is compiled, or loaded, on import and not in somebody's request. Sums may be taken in any
# order: without that a loop over the tokens of a page is not vectorised.
@numba.njit(
    "void(float32[:,:,::1], int64, int64, int64, float32[::1], float32[::1], float32[:,::1])",
    cache=True,
    nogil=True,
    fastmath={"reassoc", "nsz", "contract"},
)
def add_page_sums(
    probabilities: FloatArray,
    page_size: int,
    body_start: int,
    first_body_end: int,
    mass: FloatArray,
    peak: FloatArray,
    body: FloatArray,
) -> None:
    """Adds the probabilities of consecutive query tokens to the scores of their pages, in place.

    Args:
        probabilities: of one layer, 0 where a token sees nothing; float32 [heads, tokens, pages * page_size].
        page_size: tokens per page.
        body_start: first column of the body.
        first_body_end: first column behind the body of the first token; each next token's is one further.
        mass: sum over tokens of the mean over heads; float32 [pages].
        peak: maximum over tokens and heads; float32 [pages].
        body: mean over heads of what lies in the body; float32 [tokens, pages].
    """
    num_heads, num_tokens, _ = probabilities.shape
    share = np.float32(1.0) / np.float32(num_heads)
    for token in range(num_tokens):
        body_end = first_body_end + token
        for head in range(num_heads):
            row = probabilities[head, token]
            for page in range(len(mass)):
                start = page * page_size
                stop = start + page_size
                total = np.float32(0.0)
                for column in range(start, stop):
                    total += row[column]
                mass[page] += share * total
                peak[page] = max(peak[page], total)
                inner = total
                if start < body_start or stop > body_end:
                    inner = np.float32(0.0)
                    for column in range(max(start, body_start), min(stop, body_end)):
                        inner += row[column]
                body[token, page] += share * inner
