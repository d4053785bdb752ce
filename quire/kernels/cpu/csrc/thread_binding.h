// Binding of a team's threads to cores, such as those of NUMA nodes. In team.cpp.
#pragma once
#include <vector>

namespace quire {

// Bind the threads of later teams of cores.size() threads, by rank, to sets of cores; empty: bind none, and let those go that are
// bound, when they run next. The thread that calls run_team is bound only while the team runs. Return false, and change nothing,
// where this is not possible: a core that the process may not use, an empty set, or a system without such a call.
bool bind_teams(const std::vector<std::vector<int>>& cores);

// Whether teams of so many threads are bound.
bool are_teams_bound(int num_threads);

}  // namespace quire
