// What the module is put together from, one function per subject.
#pragma once

#include <nanobind/nanobind.h>

namespace equipoise {

void bind_plan(nanobind::module_& m);
void bind_planner(nanobind::module_& m);
void bind_shares(nanobind::module_& m);
void bind_tables(nanobind::module_& m);
void bind_routing(nanobind::module_& m);
void bind_routing_rules(nanobind::module_& m);
void bind_checksum(nanobind::module_& m);
void bind_shipment(nanobind::module_& m);
void bind_copier(nanobind::module_& m);
void bind_router(nanobind::module_& m);
void bind_simulation(nanobind::module_& m);
void bind_ordered_store(nanobind::module_& m);

}  // namespace equipoise
