// SPDX-License-Identifier: Apache-2.0
// What reads packs and decides on them: megagraph/_C.pyi is its manual.
#include "csrc/decide/pack_schedule.h"
#include "csrc/python/bindings.h"
#include "csrc/python/decider.h"
#include "csrc/python/pack_reader.h"

namespace py = pybind11;

namespace megagraph {

void bind_packs(py::module_& m) {
  m.def(
      "pack_shape",
      [](const py::object& params, int64_t tokens, int64_t extra_seqs,
         int64_t cp_size) -> py::object {
        const auto found = pack_shape(params, tokens, extra_seqs, cp_size);
        if (!found) return py::none();
        return py::make_tuple(found->tokens, found->num_seqs, found->max_seqlen, found->cp_size);
      },
      py::arg("params"), py::arg("tokens"), py::arg("extra_seqs"), py::arg("cp_size"));
  m.def(
      "pack_form",
      [](const py::object& params) -> py::object {
        const auto found = pack_form(params);
        if (!found) return py::none();
        return py::make_tuple(found->has_padded, found->is_aliased, found->pad_between_seqs,
                              found->has_seq_idx);
      },
      py::arg("params"));
  m.def(
      "schedule_packs",
      [](const std::vector<int64_t>& lengths, int64_t ranks, std::vector<int64_t> cp_sizes,
         int64_t max_tokens, int64_t max_seqs, int64_t alignment, int64_t attention_parity,
         double exchange, int64_t multiple) {
        const PackSchedule schedule =
            schedule_packs(lengths, {ranks, std::move(cp_sizes), max_tokens, max_seqs, alignment,
                                     attention_parity, exchange, multiple});
        py::list micro_batches;
        for (const auto& packs : schedule.micro_batches) {
          py::list micro_batch;
          for (const ScheduledPack& pack : packs) {
            micro_batch.append(
                py::make_tuple(pack.cp_size, pack.first_rank, py::tuple(py::cast(pack.documents))));
          }
          micro_batches.append(std::move(micro_batch));
        }
        return py::make_tuple(std::move(micro_batches), schedule.costs);
      },
      py::arg("lengths"), py::kw_only(), py::arg("ranks"), py::arg("cp_sizes"),
      py::arg("max_tokens"), py::arg("max_seqs"), py::arg("alignment"), py::arg("attention_parity"),
      py::arg("exchange"), py::arg("multiple"));
  py::class_<Decider>(m, "Decider")
      .def(py::init<int64_t, bool, bool, py::list, py::object>(), py::arg("extra_seqs"),
           py::arg("depend_on_longest"), py::arg("are_cut"), py::arg("reasons"),
           py::arg("make_key"))
      .def("set_capacities", &Decider::set_capacities, py::arg("by_cp_size"))
      .def("set_groups", &Decider::set_groups, py::arg("by_cp_size"))
      .def("refuse", &Decider::refuse, py::arg("reason"))
      .def("eager_reason", &Decider::eager_reason, py::arg("params"), py::arg("tokens"),
           py::arg("cp_size") = 1)
      .def("decide", &Decider::decide, py::arg("params"), py::arg("tokens"), py::arg("has_mask"),
           py::arg("state_of_call"), py::arg("cp_size") = 1);
}

}  // namespace megagraph
