// The best token, and masks over logits: against loops.
#include "harness.h"

CHECK(choose) {
  for (long rows : {1L, 3L})
    for (long V : {5L, 16L, 33L, 1000L}) {
      Random random((unsigned)(rows * V));
      const long words = (V + 31) / 32, step = V + 3;
      auto x = random.floats((rows - 1) * step + V);
      const auto short_x = random.bf16s((rows - 1) * step + V);
      Guarded<uint32_t> mask(rows * words);
      for (long i = 0; i < rows * words; i++) mask[i] = (uint32_t)random.source();
      for (long r = 0; r < rows; r++) mask[r * words] |= 4;
      for (int is_bf16 : {0, 1})
        for (bool masked : {false, true}) {
          Guarded<int64_t> tokens(rows);
          Guarded<float> max_logit(rows), max_allowed(rows);
          const void* from = is_bf16 ? (const void*)short_x.data : x.data;
          quire_masked_argmax(from, step, is_bf16, masked ? mask.data : nullptr, rows, V, tokens, max_logit, max_allowed);
          for (long r = 0; r < rows; r++) {
            int64_t best = -1;
            float top = -INFINITY, all = -INFINITY;
            for (long v = 0; v < V; v++) {
              const float value = is_bf16 ? value_of(short_x[r * step + v]) : x[r * step + v];
              all = std::max(all, value);
              if ((!masked || mask[r * words + v / 32] >> v % 32 & 1) && value > top) top = value, best = v;
            }
            const std::string name = named("best", {rows, V, is_bf16, masked, r});
            same(name, &tokens[r], &best, 1);
            same(name, &max_allowed[r], &top, 1);
            same(name, &max_logit[r], &all, 1);
          }
        }
      std::vector<float> want(x.data, x.data + x.count);
      for (long r = 0; r < rows; r++)
        for (long v = 0; v < V; v++)
          if (!(mask[r * words + v / 32] >> v % 32 & 1)) want[r * step + v] = -INFINITY;
      quire_mask_logits(x, step, mask, rows, V);
      same(named("bar", {rows, V}), x.data, want.data(), want.size());
    }
}
