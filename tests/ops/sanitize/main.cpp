// Runs every check, or those that are named.
#include "harness.h"

int comparisons = 0, failures = 0;

int main(int count, char** names) {
  if (quire_init()) return fprintf(stderr, "this build does not run here\n"), 77;
  for (const Check& check : Check::all()) {
    bool wanted = count == 1;
    for (int i = 1; i < count; i++) wanted |= !strcmp(names[i], check.name);
    if (wanted) check.run();
  }
  printf("%d comparisons, %d failures\n", comparisons, failures);
  return failures || !comparisons;
}
