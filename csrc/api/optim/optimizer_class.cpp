// SPDX-License-Identifier: BSD-3-Clause
// The classes whose archives can be read without an optimizer.
#include <torchfuse/optim/optimizer_class.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "api/optim/fused_optimizer_archive.h"

namespace torchfuse::optim {

namespace {

// Classes list themselves while the library is loaded, in any order of their files.
std::map<std::string, OptimizerClass>& listed_classes() {
  static std::map<std::string, OptimizerClass> classes;
  return classes;
}

}  // namespace

bool list_optimizer_class(OptimizerClass listed) {
  std::string name = listed.name;
  listed_classes().insert_or_assign(std::move(name), std::move(listed));
  return true;
}

std::vector<OptimizerClass> optimizer_classes() {
  std::vector<OptimizerClass> classes;
  for (const auto& entry : listed_classes()) classes.push_back(entry.second);
  return classes;
}

}  // namespace torchfuse::optim
