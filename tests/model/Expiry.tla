------------------------------------------------- MODULE Expiry -------------------------------------------------
(***************************************************************************************************************)
(* A round on a broker-managed tier while brokers expire segments from the front (docs/broker-expiry.md).       *)
(*                                                                                                              *)
(* Segments S0, S1, S2 and the newest, S3, have an offset each. A value of key k lies in S0, its tombstone in   *)
(* S2. The round replaces S0 and S1 by A, and S2 by B: A has no value of k, because the tombstone supersedes    *)
(* it, and B has no tombstone. A broker raises its log start in memory, deletes afterwards, and a new leader    *)
(* may begin lower again. One compactor is at work; that several do not harm each other is Replacement.tla's.   *)
(***************************************************************************************************************)
EXTENDS Integers, FiniteSets

CONSTANT Drop   \* names of rules left out

VARIABLES
  st,       \* state of each segment: none, started, finished, ours (we have begun to delete it), gone
  at,       \* what readers find at each start offset, or None
  exp,      \* segments that a broker has deleted because they had expired
  low,      \* log start of the present leader
  start,    \* the highest log start that a leader ever had
  moves,    \* how often a leader has begun lower than the one before
  phase,    \* open, begun, published, undone
  turn,     \* the group that is switched next
  look,     \* what the compactor has found out for this group: nothing, topic, start, both
  seen,     \* the highest log start that is recorded in the control log
  known,    \* exp and st as they were when the topic was read last
  outcome   \* of each group: none, switched, expired, cut off

vars == <<st, at, exp, low, start, moves, phase, turn, look, seen, known, outcome>>
broker == <<exp, low, start, moves>>
round == <<phase, turn, look, seen, known, outcome>>

None == "none"
Keeps(rule) == rule \notin Drop
Ids == {"S0", "S1", "S2", "S3", "A", "B"}
First(id) == CASE id \in {"S0", "A"} -> 0 [] id = "S1" -> 1 [] id \in {"S2", "B"} -> 2 [] id = "S3" -> 3
Last(id) == CASE id = "S0" -> 0 [] id \in {"S1", "A"} -> 1 [] id \in {"S2", "B"} -> 2 [] id = "S3" -> 3
New(group) == IF group = 1 THEN "A" ELSE "B"
Sources(group) == IF group = 1 THEN {"S0", "S1"} ELSE {"S2"}
Offsets == 0..3

\* --- what readers find ---------------------------------------------------------------------------------------------------------

Below(o) == {k \in 0..o : at[k] # None}
Lookup(o) == IF Below(o) = {} THEN None
             ELSE LET id == at[CHOOSE k \in Below(o) : \A j \in Below(o) : j <= k] IN IF o <= Last(id) THEN id ELSE None
Effective(id) == st[id] = "finished" /\ Lookup(First(id)) = id
Finished(id) == /\ st' = [st EXCEPT ![id] = "finished"]
                /\ at' = [o \in Offsets |-> IF o = First(id) THEN id ELSE IF o > First(id) /\ o <= Last(id) THEN None ELSE at[o]]
Taken(id, to) == /\ st' = [st EXCEPT ![id] = to]
                 /\ at' = [at EXCEPT ![First(id)] = IF @ = id THEN None ELSE @]

\* --- brokers -------------------------------------------------------------------------------------------------------------------

\* The log start rises over any prefix, in memory. (The newest segment stays: its records are young.)
RaiseStart == /\ \E to \in (low + 1)..3 : low' = to /\ start' = IF to > start THEN to ELSE start
              /\ UNCHANGED <<st, at, exp, moves, round>>
\* Afterwards the segments below are deleted one by one by start offset; of two that begin together, what readers find comes first.
Due == {id \in Ids : Last(id) < low /\ st[id] \in {"started", "finished"}}
DeleteExpired == /\ \E id \in Due :
                      /\ \A other \in Due \ {id} : First(id) < First(other) \/ (First(id) = First(other) /\ at[First(id)] # other)
                      /\ Taken(id, "gone") /\ exp' = exp \cup {id}
                 /\ UNCHANGED <<low, start, moves, round>>
NewLeader == /\ moves < 2 /\ moves' = moves + 1
             /\ \E to \in 0..(low - 1) : low' = to
             /\ UNCHANGED <<st, at, exp, start, round>>

\* --- the round -----------------------------------------------------------------------------------------------------------------

Introduce == /\ phase = "open"
             /\ \E group \in 1..2 : st[New(group)] = None /\ st' = [st EXCEPT ![New(group)] = "started"]
             /\ UNCHANGED <<at, broker, round>>
Begin == /\ phase = "open" /\ \A group \in 1..2 : st[New(group)] # None
         /\ phase' = "begun" /\ turn' = 1
         /\ UNCHANGED <<st, at, broker, look, seen, known, outcome>>

\* Before each group the topic is read to its end, then the leader is asked for its log start, which is recorded if it is the highest.
InTurn == phase = "begun" /\ turn \in 1..2 /\ outcome[turn] = None
ReadTopic == /\ InTurn /\ look = (IF Keeps("topic first") THEN "nothing" ELSE "start")
             /\ look' = (IF Keeps("topic first") THEN "topic" ELSE "both")
             /\ known' = [exp |-> exp, st |-> st]
             /\ UNCHANGED <<st, at, broker, phase, turn, seen, outcome>>
AskStart == /\ InTurn /\ look = (IF Keeps("topic first") THEN "topic" ELSE "nothing")
            /\ look' = (IF Keeps("topic first") THEN "both" ELSE "start")
            /\ seen' = IF low > seen THEN low ELSE seen
            /\ UNCHANGED <<st, at, broker, phase, turn, known, outcome>>

Explained(id) == Last(id) < seen /\ (Keeps("deleted too") => id \in known.exp)
Missing(id) == known.st[id] = "gone"
\* A group is moot where all that it replaces has expired; or what it has made, after it stood for all of it.
Moot(group) == \/ \A id \in Sources(group) : Explained(id)
               \/ Explained(New(group)) /\ Missing(New(group)) /\ \A id \in Sources(group) : known.st[id] # "finished"
Behind(group) == Keeps("behind") /\ \E other \in 1..(group - 1) : outcome[other] = "cut off"
Lost(group) == \/ Missing(New(group)) \/ Behind(group)
               \/ known.st[New(group)] = "started" /\ \E id \in Sources(group) : Missing(id) /\ ~Explained(id)

Settle(how) == /\ outcome' = [outcome EXCEPT ![turn] = how] /\ turn' = turn + 1 /\ look' = "nothing"
               /\ UNCHANGED <<broker, phase, seen, known>>
Withdrawn == IF st[New(turn)] \in {"started", "finished"} THEN Taken(New(turn), "ours") ELSE UNCHANGED <<st, at>>
LeaveOut == InTurn /\ look = "both" /\ Moot(turn) /\ Withdrawn /\ Settle("expired")
CutOff == InTurn /\ look = "both" /\ ~Moot(turn) /\ Lost(turn) /\ known.st[New(turn)] # "finished" /\ Withdrawn /\ Settle("cut off")
Finish == /\ InTurn /\ look = "both" /\ ~Moot(turn) /\ ~Lost(turn) /\ st[New(turn)] = "started"
          /\ Finished(New(turn)) /\ look' = "nothing"
          /\ UNCHANGED <<broker, phase, turn, seen, known, outcome>>
\* What it replaces goes in ascending order, once readers find what stands for it.
Left == {id \in Sources(turn) : st[id] = "finished"}
Replace == /\ InTurn /\ Effective(New(turn))
           /\ \E id \in Left : (\A other \in Left : First(id) <= First(other)) /\ Taken(id, "ours")
           /\ UNCHANGED <<broker, round>>
Switched == InTurn /\ Effective(New(turn)) /\ Left = {} /\ UNCHANGED <<st, at>> /\ Settle("switched")
Publish == /\ phase = "begun" /\ turn = 3 /\ phase' = "published"
           /\ UNCHANGED <<st, at, broker, turn, look, seen, known, outcome>>
\* A broker has taken what was made while what it replaces was still being replaced: the look that follows settles the group.
Again == /\ InTurn /\ look = "both" /\ st[New(turn)] = "gone" /\ ~Missing(New(turn)) /\ look' = "nothing"
         /\ UNCHANGED <<st, at, broker, phase, turn, seen, known, outcome>>

Compactor == Introduce \/ Begin \/ ReadTopic \/ AskStart \/ LeaveOut \/ CutOff \/ Finish \/ Replace \/ Switched \/ Publish \/ Again
Init == /\ st = [id \in Ids |-> IF id \in {"A", "B"} THEN None ELSE "finished"]
        /\ at = [o \in Offsets |-> CASE o = 0 -> "S0" [] o = 1 -> "S1" [] o = 2 -> "S2" [] o = 3 -> "S3"]
        /\ exp = {} /\ low = 0 /\ start = 0 /\ moves = 0
        /\ phase = "open" /\ turn = 0 /\ look = "nothing" /\ seen = 0
        /\ known = [exp |-> {}, st |-> st] /\ outcome = [group \in 1..2 |-> None]
Next == Compactor \/ RaiseStart \/ DeleteExpired \/ NewLeader
Spec == Init /\ [][Next]_vars

\* --- what must hold ------------------------------------------------------------------------------------------------------------

\* Every offset from the highest log start on is found, and so from the recorded one on.
Covered == \A o \in Offsets : o >= start => Lookup(o) # None
\* Wherever a reader may begin, at the present leader's log start or above it, no deleted key comes back.
Begins == {o \in Offsets : o >= low /\ \A later \in o..3 : Lookup(later) # None}
NoDeletedKeyReturns == \A begin \in Begins : (\E o \in begin..3 : Lookup(o) = "S0") => \E o \in begin..3 : Lookup(o) = "S2"
\* Segments that expire cut off no group, as long as no leader begins lower and none of what was made goes before what it replaces.
NoneCutOff == moves = 0 => \A group \in 1..2 : outcome[group] = "cut off" => \E other \in 1..group : New(other) \in exp
\* Whatever brokers do, the round comes to its end.
CanBeFinished == phase # "published" => ENABLED Compactor
=================================================================================================================
