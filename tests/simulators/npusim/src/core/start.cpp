#include "start.h"

#include <vector>

namespace npusim {
namespace {

// Filled while the libraries are loaded, by one thread.
std::vector<void (*)()>& starters() {
  static auto* const kept = new std::vector<void (*)()>;
  return *kept;
}

}  // namespace

void at_start(void (*starter)()) { starters().push_back(starter); }

void start() {
  for (const auto starter : starters()) starter();
}

}  // namespace npusim
