// Configuration of the eight AMX tiles: palette 1, up to 16 rows of up to 64 bytes each.
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

// gcc 12 believes that the instruction reads 8 bytes of the configuration: the clobber forces all stores before it.
inline void load_config(const TileConfig& config) {
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// gcc does not know that a tile load reads memory: this barrier forces pending stores before the load.
inline void written() { asm volatile("" : : : "memory"); }

}  // namespace quire
#endif
