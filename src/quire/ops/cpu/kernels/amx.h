// How the eight tiles are shaped: palette 1, up to 16 rows of up to 64 bytes each.
#pragma once
#ifdef QUIRE_AMX
#include <immintrin.h>
#include <stdint.h>

namespace quire {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// gcc 12 takes it that 8 bytes of the configuration are read: the clobber has all of it written before.
inline void load_config(const TileConfig& config) {
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// gcc does not know that loading a tile reads memory: what was just written for one must not be left for later.
inline void written() { asm volatile("" : : : "memory"); }

}  // namespace quire
#endif
