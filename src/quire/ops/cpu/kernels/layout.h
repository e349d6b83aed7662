// The layout of structs that Python fills.
#pragma once
#include "exports.h"

namespace quire {

struct FieldLayout {
  const char *of, *field;  // the struct's name, and the field's; "": the whole struct
  int64_t offset, size;    // bytes
};

}  // namespace quire

// Gives the number of entries.
EXPORT int quire_layouts(const quire::FieldLayout** first);
