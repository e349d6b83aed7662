// Ranks that exchange through shared memory: each gets the rows of all, in several slots if they do not fit into one; layers and steps
// that ranks split have the bits of the whole; and a rank that does not come is named, and harms no memory.
#include "exchange.h"

#include <sys/wait.h>

#include <thread>

#include "small_layer.h"
#include "step.h"

using quire::RankLink;

// Memory of ranks, and the link of each.
struct Ranks {
  static constexpr long HEADER = 128;
  char* memory;
  long bytes;
  std::vector<RankLink> links;

  Ranks(long size, long slot, long timeout_ms = 60000) : bytes(size * (HEADER + 2 * slot)) {
    memory = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    for (long rank = 0; rank < size; rank++) links.push_back({memory, rank, size, slot, timeout_ms, 0, 0});
  }
  ~Ranks() { munmap(memory, bytes); }

  // Each rank in a thread; those that lost another are failures of the check.
  void run(const char* name, const std::function<void(RankLink&)>& work) {
    std::vector<std::thread> threads;
    for (RankLink& link : links)
      threads.emplace_back([&, link = &link] {
        quire_join_ranks(link);
        work(*link);
      });
    for (auto& each : threads) each.join();
    for (const RankLink& link : links) {
      const int64_t none = 0;
      same(named(name, {link.rank}), &link.fault, &none, 1);
    }
  }
};

CHECK(all_gather) {
  const long size = 3, rows = 5, width = 24;
  for (long slot : {24L, 64L, 128L}) {
    std::vector<int> failed(size);
    const std::vector<int> none(size);
    Ranks(size, slot).run("all_gather ends", [&](RankLink& link) {
      Guarded<uint8_t> own(rows * width), all(rows * size * width);
      for (long turn = 0; turn < 3; turn++) {
        for (long i = 0; i < rows * width; i++) own[i] = (uint8_t)(link.rank * 61 + turn * 7 + i);
        quire_all_gather(&link, own, rows, width, all);
        for (long row = 0; row < rows; row++)
          for (long from = 0; from < size; from++)
            for (long i = 0; i < width; i++)
              failed[link.rank] |= all[(row * size + from) * width + i] != (uint8_t)(from * 61 + turn * 7 + row * width + i);
      }
    });
    same(named("all_gather", {slot}), failed.data(), none.data(), size);
  }
}

// Two layers, the embeddings and the head of one model, or of a rank.
struct SmallModel {
  static constexpr long V = 64, L = 3 * SmallLayer::block, M = 4, T = 20, hidden = SmallLayer::hidden;
  Random random{9};
  SmallLayer small;
  Guarded<float> cos, sin;
  Guarded<bf16> table;
  const quire::Layer* layers[2] = {&small.layer, &small.layer};
  const int64_t groups[2] = {0, 0};
  quire::Group group;
  quire::Model model{};

  explicit SmallModel(RankLink* link = nullptr)
      : small(random, M + 1, link), cos(random.floats(L * SmallLayer::P)), sin(random.floats(L * SmallLayer::P)),
        table(small.part(random.bf16s(V * hidden), {V}, hidden)), group{cos, sin, nullptr, SmallLayer::P, 0} {
    quire::Model& m = model;
    m.words = V / small.size();
    m.head = small.weight(m.words, m.words, hidden, false, table), m.head.y_ranks = m.table_ranks = link;
    m.layers = layers, m.group_of_layer = groups, m.groups = &group, m.norm = small.layer.attention_in;
    m.table = (const bf16*)m.head.data, m.count = 2, m.num_groups = 1, m.positions = L, m.packed = 1, m.vocab = V;
    m.embedding_scale = m.logit_scale = 1;
    for (size_t i = 0; i < small.keys.count; i++) small.keys[i] = small.values[i] = 0;
  }

  // A prompt, then three draws; the row's tokens.
  std::vector<int32_t> drawn() {
    std::vector<int32_t> tokens(L), blocks(M);
    for (long i = 0; i < T; i++) tokens[i] = (int32_t)(i * 7 % V);
    for (long i = 0; i < M; i++) blocks[i] = (int32_t)(M - i);
    int64_t computed = 0, length = T, drafts = 0, drew = 0, rope_offset = 0;
    float whole = 0;
    const quire::RowParams params{0, 0, 0, 1, -INFINITY};
    const int32_t* tables[] = {blocks.data()};
    const quire::Rows rows{tokens.data(), &computed, &length, &drafts, tables, &params, nullptr, &rope_offset, L, M, 0};
    const int64_t work[] = {0, T, 1, 0}, draws[] = {3};
    quire_draft(&model, &rows, work, 1, draws, nullptr, nullptr, &drew, &whole);
    return tokens;
  }
};

CHECK(layers_of_ranks) {
  SmallModel whole;
  const auto wanted = whole.drawn();
  for (long slot : {128L, 4096L}) {
    std::vector<int32_t> found[2];
    Ranks(2, slot).run("layers of ranks end", [&](RankLink& link) { found[link.rank] = SmallModel(&link).drawn(); });
    for (auto& each : found) same(named("layers of ranks", {slot}), each.data(), wanted.data(), wanted.size());
  }
}

CHECK(lost_rank) {
  const auto compute = [](RankLink& link) {
    quire_join_ranks(&link);
    SmallModel(&link).drawn();
  };
  Ranks late(2, 4096, 50);
  compute(late.links[0]);
  const int64_t never_came[] = {1, quire::RANK_LATE}, has_ended[] = {1, quire::RANK_ENDED};
  same("a rank that is late", &late.links[0].lost, never_came, 2);
  Ranks ended(2, 4096);
  const pid_t child = fork();
  if (!child) {
    quire_join_ranks(&ended.links[1]);
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  compute(ended.links[0]);
  same("a rank that has ended", &ended.links[0].lost, has_ended, 2);
}
