// The exchange of the ranks of one machine, through memory that they share.
#pragma once
#include "exports.h"

namespace quire {

enum RankFault { RANK_LATE = 1, RANK_ENDED, RANK_STOPPED };

struct RankLink {      // one rank's end of the exchange; parallel/shared_memory.py fills it in
  void* memory;        // zeros at first: the counters of each rank, then two slots of each
  int64_t rank, size;  // this one's number, and how many there are
  int64_t slot;        // bytes that a rank hands over at once
  int64_t timeout_ms;  // how long a rank waits for one that is alive
  int64_t lost, fault; // the rank that did not come, and why (RankFault); 0: none. Later exchanges do nothing
};

// Every rank gives [rows][width] bytes, and gets all[rows][size][width]: row by row the bytes of all ranks, side by side. `own_row` and
// `all_row`: bytes from row to row. A row fits into a slot. All ranks call it in the same order with the same rows and width. A rank that
// does not come is in `link`, and the results then mean nothing.
void gather(RankLink& link, const void* own, long own_row, long rows, long width, void* all, long all_row);

}  // namespace quire

// Called once, before the first exchange: the others learn which process this rank is.
EXPORT void quire_join_ranks(quire::RankLink* link);
// As `gather`, of rows without space between them.
EXPORT void quire_all_gather(quire::RankLink* link, const void* own, long rows, long width, void* all);
