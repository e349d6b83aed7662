// The numbers of a row that a draw reads. ops/cpu/structs.py has the same fields.
#pragma once
#include <stdint.h>

namespace quire {

struct RowParams {
  float temperature;  // 0: greedy
  uint32_t seed;      // the seed's part of the key (gumbel.py)
  int64_t top_k;      // 0: no limit
  double top_p;       // 1: no limit
  double log_min_p;   // -inf: no limit
};

}  // namespace quire
