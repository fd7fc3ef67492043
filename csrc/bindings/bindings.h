// The parts of the module `_native`: one function per folder of csrc, and one for plain memory.
#pragma once

#include <nanobind/nanobind.h>

namespace equipoise {

void bind_planning(nanobind::module_& m);
void bind_migration(nanobind::module_& m);
void bind_routing(nanobind::module_& m);
void bind_host_copy(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_requests(nanobind::module_& m);
void bind_simulation(nanobind::module_& m);

}  // namespace equipoise
