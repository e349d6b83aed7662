// The exchange of the ranks of one machine, through memory that they share.
#pragma once

#include "exports.h"

// Every rank gives [rows][width] bytes, and gets all[rows][size][width]: row by row the bytes of all ranks, side by side.
// `memory` (parallel/address.py): zeros at first. `width` is at most `slot`. All ranks call it in the same order with the same rows and width.
// Returns 0; or 1 + r: rank r did not come within `timeout_ms`, after which the memory is of no use.
EXPORT int quire_all_gather(
    void* memory, int rank, int size, long slot, const void* own, long rows, long width, void* all, long timeout_ms);
