// Ranks that exchange rows through shared memory: each gets those of all, in several slots if they do not fit into one.
#include "exchange.h"

#include <thread>

#include "harness.h"

CHECK(all_gather) {
  const long size = 3, rows = 5, width = 24, header = 128;
  for (long slot : {24L, 64L, 128L}) {
    alignas(128) static char memory[3 * (128 + 2 * 128)];
    memset(memory, 0, sizeof(memory));
    if (size * (header + 2 * slot) > (long)sizeof(memory)) abort();
    std::vector<std::thread> ranks;
    std::vector<int> failed(size);
    for (long rank = 0; rank < size; rank++)
      ranks.emplace_back([&, rank] {
        quire::RankLink link{memory, rank, size, slot, 60000, 0, 0};
        quire_join_ranks(&link);
        Guarded<uint8_t> own(rows * width), all(rows * size * width);
        for (long turn = 0; turn < 3; turn++) {
          for (long i = 0; i < rows * width; i++) own[i] = (uint8_t)(rank * 61 + turn * 7 + i);
          quire_all_gather(&link, own, rows, width, all);
          failed[rank] |= link.fault != 0;
          for (long row = 0; row < rows; row++)
            for (long from = 0; from < size; from++)
              for (long i = 0; i < width; i++)
                failed[rank] |= all[(row * size + from) * width + i] != (uint8_t)(from * 61 + turn * 7 + row * width + i);
        }
      });
    for (auto& each : ranks) each.join();
    const std::vector<int> none(size);
    same(named("all_gather", {slot}), failed.data(), none.data(), size);
  }
}
